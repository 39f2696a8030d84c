"""`Remote`: traces and plans on a model that `midstream serve` runs on another machine.

`calls` defines the messages between the client and a server.
"""

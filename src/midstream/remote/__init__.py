"""`Remote`: traces and plans on a model that `midstream serve` has on another machine.

`calls` is what the client and a server send each other for requests.
"""

"""`VLLM`: traces and plans on a stock vLLM engine.

`model` makes the engine's requests; `engine` runs them to their end on a sync engine and reads their results; `async_engine` streams their
outputs on an async one; `captures` receives captured rows. vLLM itself is imported by `midstream.engine` alone.
"""

"""`VLLM`: traces and plans on a stock vLLM engine.

`model` makes the engine's requests, and `stream` gives their outputs. `engine` knows the workers; `stepping` runs the same coroutines on a
`vllm.LLM`, which has no event loop. `captures` receives captured rows. vLLM itself is imported by `midstream.engine` alone.
"""

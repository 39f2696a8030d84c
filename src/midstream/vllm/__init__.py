"""`VLLM`: traces and plans on a stock vLLM engine.

`model` makes the engine's requests, and `stream` returns their outputs. `engine` calls the workers, and runs the same coroutines on a
`vllm.LLM`, which has no event loop. `captures` receives captured rows. These files use vLLM only through `midstream.engine`.
"""

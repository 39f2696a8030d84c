"""`VLLM`: traces and plans on a stock vLLM engine.

`vllm_model` makes the engine's requests, and `stream` returns their outputs. `engine` calls the workers. On a `vllm.LLM`, which has no
event loop, `engine` also runs the coroutines of the requests. `row_receiver` receives captured rows. These files use vLLM only through
`midstream.engine`.
"""

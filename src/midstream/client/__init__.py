"""The common code of `VLLM`, `LanguageModel` and `Remote`, which are in `vllm`, `transformers` and `remote`.

`trace_model` is their interface. `tracing` takes the block of a trace from the caller's frame. `collecting` is the code of
`model.collect`. `described` is the base of `VLLM` and `Remote`, whose modules are in other processes.
"""

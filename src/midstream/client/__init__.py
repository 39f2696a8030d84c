"""The common code of `VLLM`, `LanguageModel` and `Remote`, which are in `vllm`, `transformers` and `remote`.

`model` is their interface; `tracing` takes the block of a trace; `collecting` serves `model.collect`; `described` is for models whose
modules are in other processes.
"""

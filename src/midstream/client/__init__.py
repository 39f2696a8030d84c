"""What the models that users hold have in common. The models are in `vllm`, `transformers` and `remote`.

`model` is their interface; `tracing` takes the block of a trace; `collecting` serves `model.collect`; `described` is for models whose
modules are in other processes.
"""

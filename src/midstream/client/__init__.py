"""The models that users hold: `VLLM`, a vLLM engine, and `LanguageModel`, a transformers model in this process.

Both: `model` has their common interface; `tracing` takes the block of a trace; `prompts` has the token ids of prompts;
`requests` has a request's plan and result; `collecting` serves `model.collect`; `vectors_and_runs` has what plans refer to
by name.

`VLLM` alone: `vllm` makes the engine's requests, `vllm_engine` runs them to their end on a sync engine and reads their
results, `vllm_async` streams their outputs on an async one, `vllm_captures` receives captured rows.

`LanguageModel` alone: `language_model_batch` runs one batch, with plans as forward hooks. Nothing of vLLM or of
`midstream.engine` is imported.
"""

"""`LanguageModel`: traces and plans on a transformers model in this process. `batch` runs one batch, with plans as forward hooks."""

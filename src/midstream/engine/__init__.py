"""midstream inside of vLLM: it starts the engine, replaces parts of vLLM (`seams`), and adds its own worker and scheduler.

Besides this folder, only `serve` imports vLLM.
"""

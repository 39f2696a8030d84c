"""The part of midstream inside vLLM: starts engines, replaces functions of vLLM (`seams`), and adds a worker and a scheduler.

Only this folder and `serve/` import vLLM.
"""

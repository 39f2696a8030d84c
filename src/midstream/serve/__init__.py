"""vLLM's OpenAI server with plans in its requests, and midstream's routes beside vLLM's."""

"""vLLM's OpenAI server, with plans in its requests and with midstream's own routes."""

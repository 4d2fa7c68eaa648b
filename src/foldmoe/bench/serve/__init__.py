"""Speed A/B of a served model: a fresh server for every arm and repeat, ``vllm bench serve`` as the client."""

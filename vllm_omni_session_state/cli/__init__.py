"""The command ``vllm-omni-session-state``: one file a command, what it finds out apart from how it looks."""

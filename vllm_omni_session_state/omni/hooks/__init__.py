"""Where vLLM-Omni's loader is found, and every name of it that the plugin uses."""

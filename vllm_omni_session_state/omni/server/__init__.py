"""What the plugin does inside vLLM-Omni's API server: sessions begin and end there."""

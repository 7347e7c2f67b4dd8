"""What the plugin does inside vLLM-Omni's diffusion worker."""

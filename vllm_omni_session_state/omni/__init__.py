"""What this plugin knows of vLLM-Omni: the seams that it hooks and how it hooks them."""

"""Where each supported model keeps its session state: one file a model."""

"""Where each session lives when a stage has several replicas."""

"""The demo: each model's deploy YAML, served twice with only the environment flag flipped.

* `scenarios`: what a model's clients do, one scenario per model;
* `child`: writing, or one served run, in a process of its own;
* `verdict`: what the two runs show;
* `face`: the verdict;
* `tables`: the tables;
* `__main__`: the command.

How a process is run, and the progress bar, are those of the plugin's own command ``ab``.
"""

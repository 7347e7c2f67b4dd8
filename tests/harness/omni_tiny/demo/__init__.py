"""The demo: each model's deploy YAML, served twice with only the environment flag flipped.

* `scenarios`: what a model's clients do, one scenario per model;
* `child`: writing, or one served run, in a process of its own;
* `jobs`: starts such a process and reads what it reports;
* `verdict`: what the two runs show;
* `face`: the progress bar and the verdict;
* `tables`: the tables;
* `__main__`: the command.
"""

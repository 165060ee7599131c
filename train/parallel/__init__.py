"""Ways to share a run among processes; :mod:`train.launch` tells which was chosen."""

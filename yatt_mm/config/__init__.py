"""The configuration: one YAML file, typed sections, dotted overrides, and the page that documents every key.

`sections.py` has every key with its meaning; a new key is added there. Larger sections have a file of their own:
`judge_section.py`, `data_section.py`, `eval_section.py`, `algorithm_section.py`, `train_section.py`. `run_config.py`
has the whole tree and what follows from it, `yaml_file.py` reading and error messages.

A key's type, range and default are in its section. What must hold between keys, or on disk, is checked in
`yatt_mm.preflight`.

May import: algorithms, batching, common, models.layout, models.lora, models.recipes, models.weights, placement,
protocol.
"""

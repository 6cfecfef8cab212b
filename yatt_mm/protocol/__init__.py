"""Messages and other pure data that processes of a run send to each other, one module per role. No torch here.

Also the placement of roles on devices (`placement_model.py`), the record of a group (`group_record.py`), what a
judge is asked (`judge_template.py`), and how its text becomes a score (`verdicts.py`).

May import: algorithms, common, dataplane.core, models, models.layout, models.lora, models.recipes.
"""

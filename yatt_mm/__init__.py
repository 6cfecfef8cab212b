"""The trainer: reinforcement learning of vision-language models with vLLM engines and Megatron-core ranks.

`train.py` is the command `python -m yatt_mm.train`, `evaluate.py` the one that measures a model, `samples.py` the one
that shows what a run's model said, and `simulate.py` the one that compares layouts without devices. Read
`control/loop.py` first: it holds the training loop.
Importing this package imports `models`, which installs what CPU builds of torch need before any other module imports
torch.

May import: common, config, keeper, models, protocol, runtime, simulator, survey.
"""

import models  # noqa: F401

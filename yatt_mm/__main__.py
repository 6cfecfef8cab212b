"""The command `yatt-mm`: `yatt-mm train CONFIG`, `yatt-mm data CONFIG`, `yatt-mm evaluate CONFIG`,
`yatt-mm samples RUN` and `yatt-mm simulate CONFIG`, also as `python -m yatt_mm`.

Each command is the module of its name, so `python -m yatt_mm.train` does the same as `yatt-mm train`.
"""

import sys

HELP = """usage: yatt-mm {train,data,evaluate,samples,simulate} ...

Reinforcement learning of vision-language models, with an Arrow Flight data plane.

commands:
  train      train a model; the same as python -m yatt_mm.train
  data       show what a run would find in its data sets; the same as python -m yatt_mm.data
  evaluate   measure a model on held-out sets; the same as python -m yatt_mm.evaluate
  samples    show what the model said in a run; the same as python -m yatt_mm.samples
  simulate   compare layouts of devices before paying for them; the same as python -m yatt_mm.simulate

`yatt-mm COMMAND --help` explains a command. `dataplane --help` explains the data plane.

examples:
  yatt-mm train configs/digits_cpu.yaml
  yatt-mm train configs/digits_cpu.yaml --resume
  yatt-mm data configs/digits_cpu.yaml
  yatt-mm evaluate configs/digits_cpu.yaml model.path=runs/digits_cpu/hf
  yatt-mm samples runs/digits_cpu
  yatt-mm simulate configs/simulate/yatt_paper.yaml
"""


def main(arguments: list[str] | None = None) -> int:
    """Run the command that the first argument names; return the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    command, rest = (arguments[0] if arguments else ""), arguments[1:]
    if command == "train":
        from yatt_mm.train import main as train

        return train(rest, prog="yatt-mm train")
    if command == "data":
        from yatt_mm.data import main as data

        return data(rest, prog="yatt-mm data")
    if command == "evaluate":
        from yatt_mm.evaluate import main as evaluate

        return evaluate(rest, prog="yatt-mm evaluate")
    if command == "samples":
        from yatt_mm.samples import main as samples

        return samples(rest, prog="yatt-mm samples")
    if command == "simulate":
        from yatt_mm.simulate import main as simulate

        return simulate(rest, prog="yatt-mm simulate")
    if command in ("-h", "--help", "help"):
        print(HELP, end="")
        return 0
    found = f"unknown command {command!r}" if command else "no command"
    print(f"{HELP}\nerror: {found}; wanted train, data, evaluate, samples or simulate", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())

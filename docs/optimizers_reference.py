"""docs/reference/optimizers.md, from the constructors: `make reference` writes the page."""

import inspect
from pathlib import Path
from typing import Any

import torch

from poptorch import optim

PAGE = Path(__file__).parent / "reference" / "optimizers.md"
_GRAPHS = ("no effect", "for updates inside of graphs, which executors don't make")
_STATE = ("real", "the dtype of this optimizer state: torch.float16 or torch.float32")

# The answer and the remark for each argument of a constructor; arguments that are left out are real.
_ARGUMENTS: dict[str, tuple[str, str]] = {
    "params": ("real", '`model.parameters()`, or a list of groups: dictionaries with a key "params"'),
    "lr": ("real", "the learning rate; mandatory means here or in every group"),
    "momentum": ("real", "the share of the previous velocity in the new one"),
    "dampening": (
        "real",
        "reduces the gradient's share of the velocity, from the first step on; "
        "with `torch.optim.SGD` from the second, as in PyTorch",
    ),
    "nesterov": ("real", "True uses Nesterov's momentum"),
    "maximize": ("real", "True makes steps that increase the loss"),
    "betas": ("real", "the decay rates of the two moments"),
    "alpha": ("real", "the decay rate of the square average"),
    "eps": ("real", "is added to the denominator, which could be 0"),
    "weight_decay": (
        "real",
        "λ: adds λ·w to the gradient of a weight w; AdamW subtracts lr·λ·w from w; LAMB adds λ·w to the step; "
        "LARS applies it only to weights with two dimensions or more",
    ),
    "bias_correction": ("real", "False uses the moments without dividing them by 1 − β^step"),
    "amsgrad": ("refused", "True is an error when a model is wrapped"),
    "centered": ("real", "must be equal in all groups"),
    "foreach": ("real", "True runs torch's loop over lists of parameters, with the same bits"),
    "capturable": _GRAPHS,
    "differentiable": _GRAPHS,
    "fused": ("real", "updates with torch's fused kernels, bit-identical to them"),
    "decoupled_weight_decay": ("real", "True makes it AdamW"),
    "eta": ("real", "the trust coefficient, which scales a step relative to the norm of the weights"),
    "loss_scaling": ("real", "multiplies the loss and divides the gradients"),
    "velocity_scaling": ("no effect", "Pando does not scale the velocity"),
    "use_combined_accum": ("no effect", "results are the same"),
    "use_tf_variant": ("real", "True uses TensorFlow's update rule"),
    "max_weight_norm": ("real", "the bound of a weight's norm; can also be set in a parameter group"),
    "max_grad_norm": ("real", "clips the norm of all gradients together"),
    "accum_type": ("real", "the dtype of gradient sums"),
    "velocity_accum_type": _STATE,
    "first_order_momentum_accum_type": _STATE,
    "second_order_momentum_accum_type": _STATE,
}
_MEMBERS = """
## `poptorch.optim.Optimizer`

| name | answer | here |
|---|---|---|
| accum_type | real | the constructor's argument, as an attribute |
| load_state_dict | real | loads a state that `state_dict()` of a poptorch optimizer returned |
| loss_scaling | real | the constructor's argument; the next `setOptimizer` passes a change to the executor |
| max_grad_norm | real | the constructor's argument; the next `setOptimizer` passes a change to the executor |
| state | real | torch's dictionary, which executors update |
| state_dict | real | torch's format, with the additional keys `ipu_state` and `ipu_param` |
| variable_attrs | real | a `VariableAttributes`: which hyperparameters may change after compilation |

## `poptorch.optim.VariableAttributes`

| name | answer | here |
|---|---|---|
| isConstant | real | returns whether a change after compilation is an error |
| markAsConstant | real | makes `setOptimizer` refuse changes of a hyperparameter, such as "lr" |
| markAsVariable | real | allows `setOptimizer` to change a hyperparameter |
"""


def page() -> str:
    """Return the text of the page."""
    kinds = [getattr(optim, name) for name in optim.__all__]
    kinds = [kind for kind in kinds if kind not in (optim.Optimizer, optim.VariableAttributes)]
    head = (
        "# Optimizers\n\n<!-- Made by `make reference`. -->\n\n"
        "Executors call the `step()` of any optimizer, also of those of `torch.optim` and of your own;"
    )
    guide = "[guide](../guide/optimizers.md), [glossary](../glossary.md)"
    head += f" LBFGS and SparseAdam are errors ({guide}).\n"
    return head + _arguments(kinds) + _MEMBERS


def _arguments(kinds: list[Any]) -> str:
    """Return the table of arguments: a row for each argument, and a column for each optimizer."""
    signatures = {kind: inspect.signature(kind).parameters for kind in kinds}
    names = {name: None for kind in kinds for name in signatures[kind]}  # in order
    rows = []
    for name in names:
        assert name in _ARGUMENTS, f"an optimizer has the argument {name}, which this page does not explain"
        answer, remark = _ARGUMENTS[name]
        cells = [_default(kind, name) if name in signatures[kind] else "" for kind in kinds]
        rows.append(f"| {name} | {answer} | {' | '.join(cells)} | {remark} |\n")
    titles = " | ".join(kind.__name__ for kind in kinds)
    return (
        "\n## Arguments\n\nAs an attribute, `max_grad_norm` works on each of them.\n"
        "A cell has the default, or `+` if the default is None or False (of `bias_correction`: "
        "True).\nAn optimizer does not have an argument with an empty cell. None always stands for the default.\n\n"
        f"| name | answer | {titles} | here |\n|---|---|{'---|' * len(kinds)}---|\n{''.join(rows)}"
    )


def _default(kind: Any, name: str) -> str:
    """Return the default of an argument, or "+" if the default is not a number."""
    parameters = [torch.nn.Parameter(torch.zeros(1))]
    if name == "lr" and kind._needs_lr:
        return "mandatory"
    optimizer = kind(parameters, lr=1.0) if name != "lr" else kind(parameters)
    default = optimizer.defaults.get(name, getattr(optimizer, name, None))
    is_shown = isinstance(default, (int, float, tuple)) and not isinstance(default, bool)
    return f"`{default if isinstance(default, tuple) else f'{default:g}'}`" if is_shown else "+"


if __name__ == "__main__":
    PAGE.write_text(page())

"""docs/reference/optimizers.md, from the constructors: `python docs/optimizers_reference.py > <file>`."""

import inspect
from typing import Any

from popengine.update.optimizer_rules import RULES
from poptorch import optim

_HOST = ("no effect", "only for `step()` on the host")
_STATE = ("real", "the dtype of this optimizer state")

# The answer and the remark for each argument of a constructor; arguments that are left out are real.
_ARGUMENTS: dict[str, tuple[str, str]] = {
    "lr": ("real", "the learning rate; SGD and LARS need it here or in every group"),
    "amsgrad": ("refused", "True is an error when a model is wrapped"),
    "centered": ("real", "must be equal in all groups"),
    "foreach": _HOST,
    "capturable": _HOST,
    "differentiable": _HOST,
    "fused": ("real", "updates with torch's fused kernels, bit-identical to them"),
    "decoupled_weight_decay": ("real", "True makes it AdamW"),
    "eta": ("real", "the trust coefficient, which scales a step relative to the norm of the weights"),
    "loss_scaling": ("real", "multiplies the loss and divides the gradients"),
    "velocity_scaling": ("no effect", "Pando does not scale the velocity"),
    "use_combined_accum": ("no effect", "results are the same"),
    "use_tf_variant": ("real", "True uses TensorFlow's update rule"),
    "max_weight_norm": ("real", "can also be set in a parameter group"),
    "max_grad_norm": ("real", "clips the norm of all gradients together"),
    "accum_type": ("real", "the dtype of gradient sums"),
    "velocity_accum_type": _STATE,
    "first_order_momentum_accum_type": _STATE,
    "second_order_momentum_accum_type": _STATE,
}
# Remarks that hold for one class alone.
_REMARKS = {
    (optim.SGD, "dampening"): "from the first step on; with `torch.optim.SGD` from the second, as in PyTorch",
    (optim.LARS, "weight_decay"): "5e-5 by default; has no effect on weights with fewer than two dimensions",
    (optim.LARS, "momentum"): "0.9 by default",
}
_MEMBERS = """
## `poptorch.optim.Optimizer`

| name | answer | here |
|---|---|---|
| accum_type | real | an attribute |
| load_state_dict | real | loads a state that `state_dict()` of a poptorch optimizer returned |
| loss_scaling | real | an attribute |
| max_grad_norm | real | an attribute |
| state | real | torch's dictionary, which executors update |
| state_dict | real | torch's format, with the additional keys `ipu_state` and `ipu_param` |
| variable_attrs | real | a `VariableAttributes` |

## `poptorch.optim.VariableAttributes`

| name | answer | here |
|---|---|---|
| isConstant | real | returns whether a change after compilation is an error |
| markAsConstant | real | |
| markAsVariable | real | |
"""


def page() -> str:
    """Return the text of the page."""
    kinds = [getattr(optim, name) for name in optim.__all__]
    kinds = [kind for kind in kinds if kind not in (optim.Optimizer, optim.VariableAttributes)]
    names = ", ".join(rule.torch_class.__name__ for rule in RULES.values() if rule.torch_class is not None)
    head = "# Optimizers\n\n<!-- Made by `python docs/optimizers_reference.py`. -->\n\n"
    head += "Every argument can be None (torch's default). Pando has update rules for these optimizers,"
    head += (
        f" and for {names} of `torch.optim`.\nOther optimizers update the weights with their own `step()`;"
    )
    head += " LBFGS and SparseAdam are errors ([guide](../guide/optimizers.md)).\n"
    return head + "".join(map(_section, kinds)) + _MEMBERS


def _section(kind: Any) -> str:
    rows = []
    for name in inspect.signature(kind).parameters:
        answer, remark = _ARGUMENTS.get(name, ("real", ""))
        remark = _REMARKS.get((kind, name), remark)
        rows.append(f"| {name} | {answer} | {remark}{' ' if remark else ''}|\n")
    head = f"\n## `poptorch.optim.{kind.__name__}` arguments\n\n| name | answer | here |\n|---|---|---|\n"
    return head + "".join(rows)


if __name__ == "__main__":
    print(page(), end="")

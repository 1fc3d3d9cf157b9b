"""docs/reference/optimizers.md, from the constructors: `python docs/optimizers_reference.py > <file>`."""

import inspect
from typing import Any

from popengine.update.optimizer_rules import RULES
from poptorch import optim

_HOST = ("no effect", "for `step()` on the host")
_STATE = ("real", "the type of that state")

# The answer and the remark for each argument of a constructor; arguments that are left out are real.
_ARGUMENTS: dict[str, tuple[str, str]] = {
    "lr": ("real", "SGD, LARS: mandatory, here or in every group"),
    "amsgrad": ("refused", "True, when a model is wrapped"),
    "centered": ("real", "equal in all groups"),
    "foreach": _HOST,
    "capturable": _HOST,
    "differentiable": _HOST,
    "fused": ("real", "updates by torch's fused kernels, and their bits"),
    "decoupled_weight_decay": ("real", "True makes it AdamW"),
    "eta": ("real", "the part of a layer's norm that a step may be"),
    "loss_scaling": ("real", "the loss is multiplied, the gradients divided"),
    "velocity_scaling": ("no effect", "scales a tensor that is not scaled here"),
    "use_combined_accum": ("no effect", "gives the same results"),
    "use_tf_variant": ("real", "TensorFlow's rule"),
    "max_weight_norm": ("real", "also a key of parameter groups"),
    "max_grad_norm": ("real", "clips the global norm"),
    "accum_type": ("real", "the type of the gradients' sums"),
    "velocity_accum_type": _STATE,
    "first_order_momentum_accum_type": _STATE,
    "second_order_momentum_accum_type": _STATE,
}
# Remarks that hold for one class alone.
_REMARKS = {
    (optim.SGD, "dampening"): "from the first step on; `torch.optim.SGD` starts at the second, also here",
    (optim.LARS, "weight_decay"): "5e-5; weights of fewer than two dimensions have none",
    (optim.LARS, "momentum"): "0.9",
}
_MEMBERS = """
## `poptorch.optim.Optimizer`

| name | answer | here |
|---|---|---|
| accum_type | real | an attribute |
| load_state_dict | real | what `state_dict()` of a poptorch optimizer returned |
| loss_scaling | real | an attribute |
| max_grad_norm | real | an attribute |
| state | real | torch's, which executors update |
| state_dict | real | torch's, with `ipu_state` and `ipu_param` |
| variable_attrs | real | a `VariableAttributes` |

## `poptorch.optim.VariableAttributes`

| name | answer | here |
|---|---|---|
| isConstant | real | is a change after compilation an error? |
| markAsConstant | real | |
| markAsVariable | real | |
"""


def page() -> str:
    """Return the text of the page."""
    kinds = [getattr(optim, name) for name in optim.__all__]
    kinds = [kind for kind in kinds if kind not in (optim.Optimizer, optim.VariableAttributes)]
    names = ", ".join(rule.torch_class.__name__ for rule in RULES.values() if rule.torch_class is not None)
    head = "# Optimizers\n\n<!-- Made by `python docs/optimizers_reference.py`. -->\n\n"
    head += f"Every argument may be None: torch's default. Of torch's own optimizers, these are accepted: {names}.\n"
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

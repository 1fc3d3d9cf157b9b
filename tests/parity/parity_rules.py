"""Update rules as formulas on plain tensors, for those that torch.optim does not have, and their plain training."""

import parity_models
import parity_runs
import torch

import poptorch

UPDATES, ACCUMULATION, ROWS = 20, 4, 2


class Formula:
    """An optimizer from a formula: `rule(weight, gradient, state)` gives the new weight.

    `gradients`: of another dtype than the weights, perhaps.
    """

    def __init__(self, parameters, rule):
        self.parameters = list(parameters)
        self.gradients = []
        self.states = [{} for _ in self.parameters]
        self.rule = rule

    def zero_grad(self):
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self):
        for parameter, gradient, state in zip(self.parameters, self.gradients, self.states, strict=True):
            parameter.copy_(self.rule(parameter.clone(), gradient, state))


def sgd(lr, momentum=0.0, dampening=0.0, decay=0.0, nesterov=False):
    def rule(w, g, state):
        g = g + decay * w
        state["v"] = momentum * state.get("v", 0) + (1 - dampening) * g
        return w - lr * (g + momentum * state["v"] if nesterov else state["v"])

    return rule


def adam(lr, beta1=0.9, beta2=0.999, eps=1e-8, decay=0.0, corrected=True, coupled=False):
    def rule(w, g, state):
        g = g + decay * w if coupled else g
        m, v = moments(g, state, beta1, beta2, corrected)
        return w - lr * (m / (v.sqrt() + eps) + (0 if coupled else decay * w))

    return rule


def moments(g, state, beta1, beta2, corrected):
    state["t"] = state.get("t", 0) + 1
    state["m"] = beta1 * state.get("m", 0) + (1 - beta1) * g
    state["v"] = beta2 * state.get("v", 0) + (1 - beta2) * g * g
    if not corrected:
        return state["m"], state["v"]
    return state["m"] / (1 - beta1 ** state["t"]), state["v"] / (1 - beta2 ** state["t"])


def rmsprop_tf(lr, alpha=0.99, eps=1e-8, decay=0.0, momentum=0.0, centered=False):
    def rule(w, g, state):
        g = g + decay * w
        state["s"] = alpha * state.get("s", 1) + (1 - alpha) * g * g
        state["mean"] = alpha * state.get("mean", 0) + (1 - alpha) * g
        square = state["s"] - state["mean"] ** 2 if centered else state["s"]
        state["b"] = momentum * state.get("b", 0) + lr * g / (square + eps).sqrt()
        return w - state["b"]

    return rule


def lamb(lr, beta1=0.9, beta2=0.999, eps=1e-8, decay=0.0, max_weight_norm=65500.0, corrected=True):
    def rule(w, g, state):
        m, v = moments(g, state, beta1, beta2, corrected)
        u = m / (v.sqrt() + eps) + decay * w
        size, length = w.norm(), u.norm()
        trust = 1.0 if size == 0 or length == 0 else size.clamp(max=max_weight_norm) / length
        return w - lr * trust * u

    return rule


class Lars(torch.optim.Optimizer):
    """The twin of poptorch.optim.LARS in plain PyTorch."""

    def __init__(self, parameters, lr, momentum=0.9, decay=5e-5, eta=1e-3):
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "decay": decay, "eta": eta})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for w in group["params"]:
                g, rate, decay = w.grad, 1.0, 0.0
                if w.dim() > 1:
                    decay, size, length = group["decay"], w.norm(), w.grad.norm()
                    if size > 0 and length > 0:
                        rate = group["eta"] * size / (length + decay * size)
                state = self.state[w]
                v = group["momentum"] * state.get("v", torch.zeros_like(w)) + group["lr"] * rate * (
                    g + decay * w
                )
                state["v"] = v
                w -= v


def plain(optimizer, mean=True, clip=None, clip_value=None, model=parity_models.Digits, sums=torch.float32):
    """Weights after 20 updates in plain PyTorch.

    Args:
        sums: the dtype in which the gradients of the micro-batches are added up
    """
    user = parity_runs.made(model)
    step = optimizer(user.parameters())
    for rows in parity_runs.batches(user, UPDATES, ACCUMULATION * ROWS):
        total = None
        for micro_batch in parity_runs.cut(ROWS, *rows):
            step.zero_grad()
            user(*micro_batch)[1].backward()
            new = [parameter.grad for parameter in user.parameters()]
            total = (
                [(t + n).to(sums) for t, n in zip(total, new, strict=True)]
                if total
                else [n.to(sums) for n in new]
            )
        step.gradients = [gradient / ACCUMULATION if mean else gradient for gradient in total or []]
        for parameter, gradient in zip(user.parameters(), step.gradients, strict=True):
            parameter.grad = gradient.to(parameter.dtype)
        if clip is not None:
            assert torch.nn.utils.clip_grad_norm_(user.parameters(), clip) > clip  # else nothing is tested
        if clip_value is not None:
            torch.nn.utils.clip_grad_value_(user.parameters(), clip_value)
        step.step()
    return user.state_dict()


def trained(optimizer, change=lambda options: None, model=parity_models.Digits, replicas=1, rows=ROWS):
    """Weights after 20 updates through an executor, pipelined over two stages; `change` edits the options."""
    user = parity_runs.made(model)
    data = parity_runs.batches(user, UPDATES, ACCUMULATION * rows * replicas)
    strategy = poptorch.PipelinedExecution(["a", "b"], ["c", "d"])
    options = parity_runs.options(strategy, ACCUMULATION, UPDATES, replicas)
    change(options)
    executor = poptorch.trainingModel(parity_models.annotated(user), options, optimizer(user.parameters()))
    executor(*(torch.cat(values) for values in zip(*data, strict=True)))
    return user.state_dict()

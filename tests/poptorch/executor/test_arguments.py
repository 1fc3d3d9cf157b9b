"""Arguments and outputs: how they are bound, what later calls are held to, and what comes back."""

import collections
import copy
import warnings
from typing import NamedTuple

import pytest
import torch
from executor_models import options

import poptorch

ASYNC = {"sharing_strategy": poptorch.SharingStrategy.Fork}


def wrapped(function, **kwargs):
    return poptorch.inferenceModel(function, options(**kwargs))


ONE, TWO = torch.ones(2), torch.full((2,), 2.0)


# ---- binding ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [((ONE, ONE, ONE), {}), ((ONE, ONE), {"other": ONE}), ((ONE,), {"other": ONE}), ((ONE, ONE), {"a": ONE})],
)
def test_wrong_calls_are_assertion_errors(args, kwargs):
    with pytest.raises(AssertionError, match=r"forward\(a, b\)"):
        wrapped(lambda a, b: a + b)(*args, **kwargs)


def test_a_missing_argument_is_named():
    with pytest.raises(poptorch.Error, match="Mandatory parameter b missing"):
        wrapped(lambda a, b: a + b)(ONE)
    for kind in (TypeError, poptorch.Error):  # Python's own, where forward takes *args: and ours everywhere
        with pytest.raises(kind, match="Mandatory parameter b missing"):
            wrapped(lambda a, b, *rest: a + b)(ONE)


def test_defaults_are_constants():
    executor = wrapped(lambda a, b=3: a * b)
    assert torch.equal(executor(ONE), 3 * ONE)
    assert torch.equal(executor(ONE, b=3), 3 * ONE)


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


def test_tensors_may_be_nested_in_any_containers():
    def forward(pair, values, *, named):
        return pair.left + pair.right + values[0][0] + values[1]["deep"] + named["x"]

    executor = wrapped(forward)
    values = [(ONE,), collections.OrderedDict(deep=TWO)]
    assert torch.equal(executor(Pair(ONE, TWO), values, named={"x": ONE, "n": None}), 7 * ONE)


def test_a_dictionary_brings_one_warning_and_any_order_of_its_keys(caplog):
    executor = wrapped(lambda d: d["a"] - d["b"])
    assert torch.equal(executor({"a": TWO, "b": ONE}), ONE)
    assert torch.equal(executor({"b": ONE, "a": TWO}), ONE)
    assert len([r for r in caplog.records if "dictionary" in r.getMessage()]) == 1


def test_one_tensor_passed_twice_is_two_inputs():
    executor = wrapped(lambda a, b: a + 2 * b)
    assert torch.equal(executor(ONE, ONE), 3 * ONE)
    assert torch.equal(executor(ONE, TWO), 5 * ONE)


def test_other_strides_are_one_warning_and_equal_results(caplog):
    executor = wrapped(lambda a, b: a @ b)
    values = torch.arange(6.0).reshape(2, 3)
    a, b = values.t(), torch.ones(1, 3).expand(3, 3)[:, :2].t()
    for _ in range(2):
        torch.testing.assert_close(executor(a, b.t()[:2]), a @ b.t()[:2])
    assert len([r for r in caplog.records if "not contiguous" in r.getMessage()]) == 2  # one an input


def test_no_gradient_flows_to_inputs(caplog):
    x = torch.ones(2, requires_grad=True)
    executor = wrapped(lambda a: a * 2)
    assert not executor(x).requires_grad
    executor(x)
    assert [message for message in caplog.messages if "requires_grad" in message] == [
        "Input tensor has requires_grad=True set. This tensor will be detached because backward pass via inputs is"
        " not supported. It is the input a"
    ]


def test_empty_tensors_are_refused():
    with pytest.raises(poptorch.Error, match=r"tensors are unsupported.*\(0, 2\) for a\)\n  fix: leave"):
        wrapped(lambda a: a)(torch.ones(0, 2))


def test_an_input_that_forward_writes_into_changes_for_the_caller():
    def forward(x):
        x += 1
        return x * 2

    x = torch.zeros(4)
    assert torch.equal(wrapped(forward, iterations=2)(x), torch.full((4,), 2.0))
    assert torch.equal(x, torch.ones(4))


def test_the_batch_is_whole_micro_batches():
    executor = wrapped(lambda a: a, iterations=3, replicas=2)
    with pytest.raises(AssertionError, match="Invalid batch dimension") as error:
        executor(torch.ones(4, 2))
    for word in (
        "(4, 2)",
        "multiple of 6",
        "deviceIterations 3",
        "replicationFactor 2",
        "gradientAccumulation 1",
    ):
        assert word in str(error.value)


# ---- later calls -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (
            (ONE, [ONE, ONE]),
            (ONE, (ONE, ONE)),
            r"Type mismatch for b: expected <class 'list'> but got <class 'tuple'>",
        ),
        ((ONE, ONE), (ONE, None), "Type mismatch for b"),
        ((ONE, [ONE, ONE]), (ONE, [ONE]), "Length mismatch for b: expected 2 but got 1"),
        (
            (ONE, {"x": ONE, "y": ONE}),
            (ONE, {"y": ONE, "z": ONE}),
            "Keys mismatch for b.*Missing arguments: x.*Unexpected arguments: z",
        ),
        (
            (ONE, [ONE]),
            (ONE, [torch.ones(2, dtype=torch.int64)]),
            r"Data type mismatch for b\[0\]: expected torch.float32 but got torch.int64",
        ),
        (
            (ONE, {"k": ONE}),
            (ONE, {"k": torch.ones(4)}),
            r"Shape mismatch for b\[\"k\"\]: expected torch.Size\(\[2\]\) but got torch.Size\(\[4\]\)",
        ),
        ((ONE, 5), (ONE, 3), "Value mismatch for b: expected 5 but got 3"),
        ((ONE, [5, ONE]), (ONE, [3, ONE]), r"Value mismatch for b\[0\]"),
    ],
)
def test_what_differs_from_the_compiled_inputs_is_named(first, second, message):
    executor = wrapped(
        lambda a, b: a * sum(n for n in (b if isinstance(b, list) else [b]) if isinstance(n, int))
    )
    executor(*first)
    with pytest.raises(poptorch.Error, match=message) as error:
        executor(*second)
    assert "destroy()" in str(error.value)
    executor(*first)


def test_the_number_of_positional_arguments_is_fixed():
    executor = wrapped(lambda *args: args[0])
    executor(*[ONE] * 5)
    words = "Number of positional arguments mismatch: expected 5 arguments but got 4"
    with pytest.raises(poptorch.Error, match=words):
        executor(*[ONE] * 4)


def test_an_argument_that_is_left_out_is_told_by_the_number_of_arguments():
    executor = wrapped(lambda a, b=None, c=None, d=None, e=None: a + d + e)
    executor(ONE, None, None, ONE, ONE)
    with pytest.raises(poptorch.Error, match="expected 5 arguments but got 4"):
        executor(ONE, None, None, ONE)
    with pytest.raises(poptorch.Error, match="Type mismatch for b"):
        executor(ONE, ONE, None, ONE, ONE)
    executor(ONE, None, d=ONE, e=ONE)  # the same arguments, written otherwise


@pytest.mark.parametrize("mode", [poptorch.DataLoaderMode.Sync, poptorch.DataLoaderMode.Async])
def test_a_loader_of_other_options_than_the_models_is_one_warning(caplog, mode):
    rows = torch.utils.data.TensorDataset(torch.arange(48.0).reshape(24, 2))
    loading, running = (
        poptorch.Options().deviceIterations(n).showCompilationProgressBar(False) for n in (4, 2)
    )
    loader = poptorch.DataLoader(
        loading,
        rows,
        batch_size=2,
        mode=mode,
        async_options=ASYNC if mode == poptorch.DataLoaderMode.Async else None,
    )
    for chosen, told in ((loading, False), (running, True)):
        caplog.clear()
        executor = poptorch.inferenceModel(lambda x: x + 1, chosen)
        for (batch,) in loader:
            executor(batch)
        assert len(caplog.messages) == told
    assert "loaded for deviceIterations 4 x" in caplog.text
    assert "the model reads them as deviceIterations 2 x" in caplog.text
    assert "fix:" in caplog.text
    loader.terminate()


def test_keyword_arguments_are_fixed():
    executor = wrapped(lambda a, **kwargs: a + kwargs["x"])
    executor(ONE, x=ONE)
    with pytest.raises(poptorch.Error, match=r"Keys mismatch for kwargs.*Unexpected arguments: y"):
        executor(ONE, x=ONE, y=ONE)


def test_what_came_through_kwargs_has_its_plain_name():
    executor = wrapped(lambda a, **kwargs: a + kwargs["t"][0] * kwargs["u"])
    executor(ONE, u=5, t=[ONE])
    with pytest.raises(poptorch.Error, match="Value mismatch for u: expected 5 but got 3"):
        executor(ONE, u=3, t=[ONE])
    with pytest.raises(poptorch.Error, match=r"Data type mismatch for t\[0\]: expected torch.float32 but"):
        executor(ONE, u=5, t=[ONE.int()])


def test_a_micro_batch_of_torchs_own_loader_is_explained():
    opts = poptorch.Options()
    opts.Training.gradientAccumulation(8)
    model = torch.nn.Sequential(torch.nn.Linear(8, 1), torch.nn.MSELoss())
    model.forward = lambda x: torch.nn.functional.mse_loss(model[0](x), torch.zeros(x.shape[0], 1))
    trainer = poptorch.trainingModel(model, opts)
    trainer(torch.ones(64, 8))
    with pytest.raises(poptorch.Error) as caught:
        trainer(torch.ones(8, 8))
    text = str(caught.value)
    assert "expected torch.Size([64, 8]) but got torch.Size([8, 8])" in text
    assert "64 = micro-batch 8 x deviceIterations 1 x" in text and "gradientAccumulation 8" in text
    assert "poptorch.DataLoader(options, dataset, batch_size=8)" in text


def test_destroy_allows_other_inputs():
    executor = wrapped(lambda a: a + 1)
    executor(ONE)
    executor.destroy()
    assert executor(torch.ones(5)).shape == (5,)


# ---- outputs ---------------------------------------------------------------------------------------------


class Out(NamedTuple):
    first: torch.Tensor
    rest: list


def test_the_structure_of_outputs_is_kept():
    def forward(a):
        ordered = collections.OrderedDict(z=a, b=None, a=[a + 1, (a + 2,)])
        return Out(a + 3, [ordered, 5, "text"])

    found = wrapped(forward)(ONE)
    assert type(found) is Out
    ordered, five, text = found.rest
    assert (five, text, type(ordered)) == (5, "text", collections.OrderedDict)
    assert list(ordered) == ["z", "b", "a"]
    assert torch.equal(ordered["a"][1][0], 3 * ONE)
    assert ordered["b"] is None


def test_a_forward_that_returns_nothing_gives_none():
    assert wrapped(lambda a: None)(ONE) is None


def test_a_constant_of_the_host_is_returned_as_it_is_with_a_warning():
    constant = torch.arange(3)
    executor = wrapped(lambda a: (a, constant), iterations=2)
    with pytest.warns(UserWarning, match="Output expected to be on the IPU"):
        _, found = executor(ONE)
    assert torch.equal(found, constant)
    assert found.dtype == torch.int64


def test_an_input_returned_untouched_is_an_output_like_others():
    x = torch.arange(4.0)
    found = wrapped(lambda a: a, iterations=2)(x)
    assert torch.equal(found, x)
    assert found is not x
    found += 1
    assert torch.equal(x, torch.arange(4.0))


def test_aliases_are_returned_as_separate_tensors():
    def forward(a):
        b = a + 1
        return b, b, b.view(2, 1)

    one, two, three = wrapped(forward)(ONE)
    one.zero_()
    assert torch.equal(two, TWO)
    assert torch.equal(three, TWO.view(2, 1))


def test_outputs_have_no_gradient_and_backward_says_what_to_do():
    found = wrapped(lambda a: a * 2)(ONE)
    assert not found.requires_grad
    with pytest.raises(poptorch.Error, match=r"backward\(\) cannot be called explicitly") as error:
        found.backward()
    assert "poptorch.trainingModel" in str(error.value) and "optimizer.max_grad_norm" in str(error.value)


def test_outputs_pickle_as_plain_tensors(tmp_path):
    torch.save(copy.deepcopy(wrapped(lambda a: a * 2)(ONE)), tmp_path / "out.pt")
    loaded = torch.load(tmp_path / "out.pt")  # weights_only: no function of ours would pass
    assert torch.equal(loaded, TWO)
    assert vars(loaded) == {}


def test_outputs_of_calls_do_not_share_memory():
    executor = wrapped(lambda a: a * 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first = executor(ONE)
        executor(TWO)
    assert torch.equal(first, TWO)


DEFAULTS = {
    "of a parameter": lambda x, scale=TWO: x * scale,
    "of a keyword": lambda x, *, scale=TWO: x * scale,
    "before another one": lambda x, scale=TWO, n=2: x * scale * (n / 2),
    "in a tuple": lambda x, scale=(TWO, 1): x * scale[0],
    "in a dictionary": lambda x, scale={"a": TWO}: x * scale["a"],
}


@pytest.mark.parametrize("kind", DEFAULTS)
def test_a_tensor_that_is_a_default_value_is_a_constant_of_each_micro_batch(kind):
    x = torch.arange(8.0).view(4, 2)
    assert torch.equal(wrapped(DEFAULTS[kind], iterations=2)(x), x * 2)


ARGUMENTS = (TWO, 3 * ONE, 5 * ONE)
CALLS = ((0, ""), (1, ""), (0, "c"), (3, ""), (0, "ac"), (2, "c"), (0, ""))


@pytest.mark.parametrize("first", range(4))
def test_an_argument_with_a_default_tensor_may_be_left_out_in_any_call(first):
    def forward(x, a=ONE, b=TWO, c=ONE):
        return x + 2 * a + 4 * b + 8 * c

    executor = wrapped(forward)
    for count, names in CALLS[first:] + CALLS[:first]:
        more = {name: ARGUMENTS["abc".index(name)] for name in names}
        assert torch.equal(
            executor(ONE, *ARGUMENTS[:count], **more), forward(ONE, *ARGUMENTS[:count], **more)
        )


def test_none_in_place_of_a_default_tensor_is_none():
    executor = wrapped(lambda x, a=ONE: x if a is None else x + a)
    for given, expected in (({}, TWO), ({"a": None}, ONE), ({"a": TWO}, 3 * ONE), ({}, TWO)):
        assert torch.equal(executor(ONE, **given), expected)


def test_attributes_of_python_on_an_input_are_an_error():
    x = torch.ones(2, 2)
    x.scale = 3
    with pytest.raises(poptorch.Error, match=r"input x .*attributes of Python \(scale\)") as caught:
        poptorch.inferenceModel(lambda x: x * x.scale)(x)
    assert "fix: " in str(caught.value)


def test_an_output_of_one_executor_is_an_input_of_another():
    first, second = (poptorch.inferenceModel(lambda x: x * 2) for _ in range(2))
    assert torch.equal(second(first(torch.ones(2))), torch.full((2,), 4.0))


@pytest.mark.parametrize("first_is_alone", [False, True])
def test_one_tensor_for_two_inputs_of_which_forward_writes_one_is_an_error(first_is_alone):
    executor = poptorch.inferenceModel(lambda a, b: a.mul_(2) + b)
    if first_is_alone:
        assert torch.equal(executor(torch.ones(2), torch.ones(2)), torch.full((2,), 3.0))
    x = torch.ones(2)
    with pytest.raises(poptorch.Error, match="inputs a and b are one tensor, and forward writes into it"):
        executor(x, x)
    assert torch.equal(x, torch.ones(2))


CREATED = {
    "zeros": lambda: torch.zeros(2),
    "ones": lambda: torch.ones(2),
    "full": lambda: torch.full((2,), 0.5),
    "arange": lambda: torch.arange(0.0, 1.0, 0.5),
    "linspace": lambda: torch.linspace(0, 1, 2),
    "logspace": lambda: torch.logspace(0, 1, 2),
    "eye": lambda: torch.eye(2)[0],
    "rand": lambda: torch.rand(2) * 0,
    "randn": lambda: torch.randn(2) * 0,
    "tensor": lambda: torch.tensor([1.0, 2.0]),
    "empty": lambda: torch.empty(2).fill_(1),
    "hann_window": lambda: torch.hann_window(2),
    "scalar_tensor": lambda: torch.scalar_tensor(2.0) * torch.ones(2),
    "normal": lambda: torch.normal(0.0, 1.0, (2,)) * 0,
    "Tensor": lambda: torch.Tensor([1.0, 2.0]),
}


@pytest.mark.parametrize("name", CREATED)
def test_what_forward_makes_has_the_default_dtype_of_the_call(name):
    make = CREATED[name]
    # 1 in float32, 2 in float64
    forward = lambda x: ((make() * 0 + 1 + 1e-9) - 1) * 1e9 + x.half()  # noqa: E731
    executor, x = poptorch.inferenceModel(forward), torch.ones(2)
    expected = executor(x)
    torch.set_default_dtype(torch.float64)
    try:
        found, plain = executor(x), forward(x)
    finally:
        torch.set_default_dtype(torch.float32)
    assert found.dtype == expected.dtype
    assert torch.equal(found, plain.float())
    assert torch.equal(executor(x), expected)

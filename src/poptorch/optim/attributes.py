"""Which attributes of an optimizer may change after compilation, as its user marked them."""

from collections.abc import Iterable


class VariableAttributes:
    """Attributes are constant unless they were given to the optimizer's constructor or are marked here.

    >>> optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1)
    >>> optimizer.variable_attrs.markAsVariable("momentum")
    """

    def __init__(self, variable: Iterable[str], allowed: Iterable[str]) -> None:
        self._allowed = tuple(allowed)
        self._variable: set[str] = set()
        for name in variable:
            self.markAsVariable(name)

    def __iter__(self):
        """The names that can be marked."""
        return iter(self._allowed)

    def __repr__(self) -> str:
        marks = (f"{name}={'constant' if self.isConstant(name) else 'variable'}" for name in self)
        return f"VariableAttributes({', '.join(marks)})"

    def isConstant(self, name: str) -> bool:
        """Whether changing the attribute after compilation is an error."""
        self._check(name)
        return name not in self._variable

    def markAsConstant(self, name: str) -> None:
        """Promise that the attribute won't change; takes effect at the next compilation."""
        self._check(name)
        self._variable.discard(name)

    def markAsVariable(self, name: str) -> None:
        """Let the attribute change at `setOptimizer`; takes effect at the next compilation."""
        self._check(name)
        self._variable.add(name)

    def _check(self, name: str) -> None:
        known = ", ".join(sorted(self._allowed))
        assert name in self._allowed, f"Unknown attribute {name}, allowed values: {known}"

"""What the model that a batch names stands for, and which entitlement of its creator it uses."""

from collections.abc import Mapping

from gateway.errors import NotFound
from gateway.fleet.model_runtime import ModelRuntime
from gateway.pipeline.plan import find_model
from gateway.records.request import Principal
from gateway.records.tenancy import TOKEN_NAME
from gateway.routing.split_alias import SplitAlias
from gateway.tenancy.keyring import entitled


class BatchModels:
    """Models by the names that batches use: names, aliases, patterns, adapters, split aliases."""

    def __init__(
        self, models: Mapping[str, ModelRuntime], splits: Mapping[str, SplitAlias]
    ) -> None:
        """`models` by name and alias; both may change."""
        self.by_name = models
        self._splits = splits

    def served(self, name: str) -> list[ModelRuntime]:
        """The models that a name stands for. Raises NotFound."""
        if split := self._splits.get(name):
            return [self.by_name[model] for model in split.models]
        return [find_model(self.by_name, name)]

    def known(self, name: str) -> list[ModelRuntime]:
        """The same; none where there is none."""
        try:
            return self.served(name)
        except NotFound:
            return []

    def entitlement(
        self, principal: Principal, name: str, asked: str | None, now_unix_s: float
    ) -> str:
        """The one that a batch's items use; "" where each uses that of its own model.

        Raises Refusal where there is none.
        """
        split, served = name in self._splits, self.served(name)
        opened = next((each for each in served if principal.opens(each.name)), served[0])
        adapter = "" if split else opened.adapter(name)
        chosen = entitled(principal, opened.name, now_unix_s, asked, adapter=adapter).entitlement
        several = split and principal.choices and asked is None
        return "" if several and not principal.key.startswith(TOKEN_NAME) else chosen

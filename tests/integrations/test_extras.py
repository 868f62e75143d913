"""An adapter without its framework says which extra to install."""

from __future__ import annotations

import importlib
import sys

import pytest


@pytest.mark.parametrize(
    ("module", "extra"),
    [("lightning", "lightning"), ("transformers", "transformers"), ("accelerate", "transformers")],
)
def test_the_import_of_an_adapter_without_its_framework_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, module: str, extra: str
) -> None:
    adapter = f"outlast.integrations.{module}"
    for name in list(sys.modules):
        if name in (module, adapter) or name.startswith((f"{module}.", f"{adapter}.")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf"pip install 'outlast\[{extra}\]'"):
        importlib.import_module(adapter)

"""An adapter without its framework says which extra to install."""

from __future__ import annotations

import importlib
import sys

import pytest

from outlast.integrations.common import not_importable


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


def test_a_framework_that_lacks_something_is_not_called_missing() -> None:
    other_version = ImportError("cannot import name 'X' from 'lightning.y'", name="lightning.y")
    for cause in (other_version, ModuleNotFoundError("No module named 'z'", name="z")):
        text = str(not_importable("lightning", "lightning", cause))
        assert f"as it is installed ({cause}): pip install 'outlast[lightning]'" in text

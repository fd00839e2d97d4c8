"""The search of the site works on pages that are opened from a disk, and fetches nothing for it."""

from __future__ import annotations

import yaml

from docs.blocks import ROOT

SETTINGS = yaml.safe_load((ROOT / "mkdocs.yml").read_text())


def test_the_index_is_written_as_a_script() -> None:
    """A page on a disk may not read files, but it may load scripts."""
    assert {"search", "offline"} <= {plugin for plugin in SETTINGS["plugins"] if isinstance(plugin, str)}


def test_the_worker_that_the_plugin_asks_for_is_ours() -> None:
    """Without a script of this name the plugin takes one from elsewhere."""
    (script,) = SETTINGS["extra"]["polyfills"]
    assert "iframe-worker" in script
    text = (ROOT / "docs" / script).read_text()
    assert 'location.protocol === "file:"' in text and "window.Worker" in text and "http" not in text

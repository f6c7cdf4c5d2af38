"""Figures: plotly understands them, and every switch of theirs is on the page."""

import json
import re

import pytest


def test_plotly_accepts_every_figure(page):
    graph = pytest.importorskip("plotly.graph_objects")
    text = page.read_text()
    figures = json.loads(re.search(r'<script type="application/json" id="figures">(.*?)</script>', text, re.S)[1])
    for figure in figures:
        plain = json.loads(re.sub(r'"@[a-z0-9-]+(/[0-9.]+)?"', '"#123456"', json.dumps(figure)))
        axes = {f"{name}axis": {"title": {"text": plain[name]["title"]}, **plain[name]["settings"]} for name in "xy"}
        for layout in (plain["layout"], {**plain["layout"], **plain["narrow"]}):
            graph.Figure({"data": [trace["data"] for trace in plain["traces"]], "layout": {**axes, **layout}})


def test_every_key_of_a_trace_can_be_switched(page):
    text = page.read_text()
    figures = json.loads(re.search(r'<script type="application/json" id="figures">(.*?)</script>', text, re.S)[1])
    for figure in figures:
        markup = re.search(rf'<figure id="{figure["id"]}".*?</figure>', text, re.S)[0]
        switches = set(re.findall(r'data-key="([^"]*)"', markup)) | set(re.findall(r'<option value="([^"]*)"', markup))
        keys = {key for trace in figure["traces"] for key in trace["keys"]}
        assert keys <= switches, figure["id"]

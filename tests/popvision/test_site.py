"""The search of the documentation site finds the page that answers a question, among its first three results."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# What a reader types, and the pages that answer it (starts of paths in the site).
QUESTIONS = {
    "deviceIterations": ("guide/options", "reference/options"),
    "outputMode": ("guide/options", "reference/options"),
    "gradientAccumulation": ("guide/options", "reference/options"),
    "replicationFactor": ("guide/options", "reference/options"),
    "setExecutionStrategy": ("guide/blocks", "reference/options"),
    "enableProfiling": ("guide/profiling", "reference/options"),
    "PipelinedExecution": ("guide/blocks", "reference/"),
    "ShardedExecution": ("guide/blocks", "reference/"),
    "BeginBlock": ("guide/blocks", "reference/"),
    "custom_op": ("guide/custom_ops", "reference/"),
    "loss scaling": ("guide/optimizers", "reference/optimizers"),
    "learning rate": ("guide/optimizers",),
    "gradient clipping": ("guide/optimizers", "coming_from/plain"),
    "float16": ("guide/optimizers", "guide/speed"),
    "checkpoint": ("guide/saving", "guide/scaling"),
    "incomplete batch": ("guide/shapes",),
    "batch norm": ("guide/scaling",),
    "several hosts": ("guide/scaling",),
    "Kubernetes": ("guide/kubernetes",),
    "Windows": ("guide/tools", "labs/"),
    "macOS": ("guide/tools", "guide/"),
    "WSL": ("guide/tools", "labs/"),
    "Colab": ("guide/tools",),
    "tensorboard": ("guide/tools",),
    "wandb": ("guide/tools",),
    "mixed precision": ("guide/tools", "guide/optimizers"),
    "does not fit": ("guide/tools", "guide/planning", "guide/scaling"),
    "bubble": ("ten_minutes", "labs/bubble", "concepts/step"),
}
RESULTS = """new Promise(done => {
  const list = document.querySelector(".md-search-result__list");
  const meta = document.querySelector(".md-search-result__meta");
  const links = () => [...list.querySelectorAll(".md-search-result__item > a")].slice(0, 3).map(link => link.href);
  const check = () => links().length || /No matching/.test(meta.textContent) ? done(links()) : setTimeout(check, 20);
  check();
})"""


@pytest.fixture(scope="module")
def site(chromium, tmp_path_factory):
    if importlib.util.find_spec("material") is None:
        pytest.skip('mkdocs-material is not installed: pip install ".[docs]"')
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    return folder


@pytest.mark.parametrize("question", QUESTIONS)
def test_the_search_finds_the_page_of(question, site, chromium):
    chromium.open(site / "index.html")
    chromium.value("document.querySelector('label[for=__search]').click()")
    chromium.value("document.querySelector('.md-search__input').focus()")
    chromium.type(question)
    chromium.press("Shift")
    found = [link.removeprefix(f"{site.resolve().as_uri()}/") for link in chromium.value(RESULTS)]
    assert any(page.startswith(QUESTIONS[question]) for page in found), found

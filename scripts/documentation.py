"""Hooks of mkdocs: what the site holds beside docs/, links between both, and each page as plain Markdown.

mkdocs calls the `on_...` functions by their names (mkdocs.yml names this file).
"""

from __future__ import annotations

import enum
import functools
import importlib
import inspect
import json
import logging
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Container
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
# Pages of the repository outside docs/, at the same paths in the site; pictures beside them are taken along.
OUTSIDE = [
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "examples/**/*.md",
    "benchmarks/**/*.md",
]
FENCES = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
NAME = re.compile(r"(?<!\[)`(?:poptorch\.(?=\w)|(?=[A-Z]))(\w+)(?:\([^`]*\))?`(?!\])")  # not in a link
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\[\]]*\]\([^()]*\))*)\]\(([^()\s]+)\)")

# Above the first picture of the home page.
_BUTTONS = (
    "[Ten minutes](docs/ten_minutes.md){ .md-button .md-button--primary }"
    " [Labs for teachers](docs/labs/README.md){ .md-button } [Install](#install){ .md-button }"
)

_log = logging.getLogger("mkdocs.hooks")  # with --strict a warning fails the build
_markdown: dict[str, str] = {}  # by the page's path in the site
_names: set[str] = set()  # the anchors of reference/api.md, such as poptorch.Options.deviceIterations
# How much a page counts in a search, by the first match of the start of its path: guides and options come first.
_SEARCH_BOOST = {
    "guide/kubernetes": 8,
    "guide/options": 8,
    "guide/": 4,
    "reference/options": 8,
    "reference/": 2,
    "troubleshooting": 4,
    "benchmarks/": 0.2,
    "examples/": 0.2,
    "CHANGELOG": 0.2,
    "": 1,
}


def on_config(config: Any) -> None:
    """Put the pages that guide/README.md lists into the navigation, in its groups."""
    contents: list[Any] = [{"All guides": "guide/README.md"}]
    pages = contents
    for line in (ROOT / "docs/guide/README.md").read_text().splitlines():
        if line.startswith("## "):
            pages = []
            contents.append({line[3:]: pages})
        elif page := re.match(r"[-\d.]+ \[([^\]]*)\]\(([\w-]+\.md)\)", line):
            pages.append({page[1]: f"guide/{page[2]}"})
    config.nav = [{"How to": contents} if entry == {"How to": "guide"} else entry for entry in config.nav]


def on_files(files: Files, config: Any) -> Files:
    """Add the pages outside docs/, their pictures, and the reference that is made from the code."""
    for pattern in OUTSIDE:
        for page in sorted(ROOT.glob(pattern)):
            for path in [page, *sorted(page.parent.glob("*.png"))] if page.parent != ROOT else [page]:
                name = path.relative_to(ROOT).as_posix()
                if files.get_file_from_path(name) is None:
                    files.append(File(name, str(ROOT), config.site_dir, use_directory_urls=False))
    files.append(File.generated(config, "reference/api.md", content=(api := api_page())))
    _names.update(re.findall(r"{:? ?#([\w.]+) ?}$", api, re.MULTILINE))
    for command in _COMMANDS:
        files.append(File.generated(config, f"reference/{command}.md", content=command_page(command)))
    for program in sorted(ROOT.glob("examples/*/*.py")):  # as pages, for the links to them
        name = program.relative_to(ROOT).as_posix()
        text = f"# {program.name}\n\n```py\n{program.read_text()}```\n"
        files.append(File.generated(config, f"{name.removesuffix('.py')}.md", content=text))
    for path in sorted((ROOT / "docs/labs").glob("*.ipynb")):
        files.append(File.generated(config, f"labs/{path.stem}.md", content=notebook_page(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Turn links of the repository into links of the site, and link names to the reference."""
    here = page.file.src_uri
    page.meta["description"] = _first_sentence(markdown)
    if here == "README.md":
        page.meta["hide"] = ["navigation"]  # one entry
        markdown = markdown.replace("\n![", f"\n{_BUTTONS}\n\n![", 1)
    page.meta["search"] = {
        "boost": next(boost for start, boost in _SEARCH_BOOST.items() if here.startswith(start))
    }
    parts = FENCES.split(markdown)
    parts[::2] = [LINK.sub(lambda found: _link(found, here, files), part) for part in parts[::2]]
    if here.startswith(("guide/", "concepts/", "coming_from/")):
        seen: set[str] = set()
        parts[::2] = [NAME.sub(lambda found: _linked_name(found, seen), part) for part in parts[::2]]
    text = "".join(parts).replace('"docs/images/', '"images/')
    if here.startswith("reference/"):
        text = _with_linked_rows(text)
    _markdown[here] = text
    return text


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Put drawings into the page itself, so that they follow its colours, and link its plain text."""

    def inlined(found: re.Match[str]) -> str:
        name = os.path.normpath((PurePosixPath(page.file.dest_uri).parent / found[2]).as_posix())
        drawing = (ROOT / "docs" / name).read_text()
        return f'<div class="picture" role="img" aria-label="{found[1]}">{drawing}</div>'

    html = re.sub(r'<p><img alt="([^"]*)" src="([^"]*\.svg)" ?/?></p>', inlined, html)
    plain = PurePosixPath(page.file.src_uri).name
    return f'{html}<p class="plain-text"><a href="{plain}">This page as plain Markdown</a></p>'


def on_post_build(config: Any) -> None:
    """Write each page as plain Markdown beside its HTML, and llms.txt, which lists them."""
    site = Path(config.site_dir)
    lines = [f"# {config.site_name}", "", f"> {config.site_description}", ""]
    for name, text in sorted(
        _markdown.items(), key=lambda item: (item[0] != "README.md", (ROOT / item[0]).exists(), item[0])
    ):
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text)
        title = re.search(r"^# (.+)$", text, re.MULTILINE)
        lines.append(f"- [{title[1] if title else name}]({name}): {_first_sentence(text)}")
    (site / "llms.txt").write_text("\n".join(lines) + "\n")


def _first_sentence(text: str) -> str:
    """Return the first sentence of a page's first paragraph of prose, without links and emphasis."""
    prose = (part for part in FENCES.sub("", text).split("\n\n") if re.match(r"\s*[\w*`]", part))
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(next(prose, "").replace("*", "").split()))
    return re.split(r"(?<=[.:]) (?=[A-Z])", plain)[0]


def _link(found: re.Match[str], here: str, files: Files) -> str:
    """Return the link to the same thing in the site, or its words alone where the site doesn't have it."""
    bang, words, target = found.groups()
    if re.match(r"[a-z]+:|#", target):
        return found[0]
    path, _, anchor = target.partition("#")
    source = here if (ROOT / here).exists() else f"docs/{here}"
    name = os.path.normpath((PurePosixPath(source).parent / path).as_posix())
    if not (ROOT / name).exists():
        _log.warning("%s: the repository has no %s, which the link %s names", source, name, target)
    if (ROOT / name).is_dir():
        name += "/README.md"
    if name.startswith("examples/"):
        name = re.sub(r"\.py$", ".md", name)
    name = name.removeprefix("docs/")
    if here == "labs/README.md":
        name = name.replace(".ipynb", ".md")  # the page of a notebook
    if files.get_file_from_path(name) is None:
        return words if (ROOT / name).exists() else found[0]  # mkdocs says what it doesn't find
    relative = os.path.relpath(name, PurePosixPath(here).parent)
    return f"{bang}[{words}]({relative}{'#' + anchor if anchor else ''})"


def _linked_name(found: re.Match[str], seen: set[str]) -> str:
    """Return the first use of a public name on a page as a link to its entry in the reference."""
    name = f"poptorch.{found[1]}"
    if name not in _names or name in seen:
        return found[0]
    seen.add(name)
    return f"[{found[0]}](../reference/api.md#{name})"


def _with_linked_rows(text: str) -> str:
    """Return a page of tables with a link from the name of each row to its entry in api.md."""
    lines, space = [], ""
    for line in text.split("\n"):
        if heading := re.match(r"## `([\w.]+)`$", line):
            space = heading[1]
        elif (row := re.match(r"\| (`?(\w+)[^|]*) \|", line)) and f"{space}.{row[2]}" in _names:
            line = f"| [{row[1]}](api.md#{space}.{row[2]}) |{line[row.end() :]}"
        lines.append(line)
    return "\n".join(lines)


_COMMANDS = {  # what the help texts don't have: exit codes, and files that are written
    "popvision": """\
Exit codes: 0; 1, after a message, if a file can't be read or written; 2, if an argument is wrong. Files: `report`
writes `report.html` into the report's folder, and `compare` writes `comparison.html` into the current folder, over a
file of that name, unless `--output` names another file. `summary` only prints.""",
    "poprun": """\
Exit codes: 0; that of the instance that failed first; 128 + n after signal n, so 130 after Ctrl-C; 127, if the program
can't be started; 2, if an argument is wrong. Files: only those of `--export-config`, and of `popdist.Checkpoint` in
`--checkpoint-dir`. [The guide](../guide/poprun.md) explains the options.""",
    "ipujob": """\
Exit codes: 0; 1, if a job failed, or the cluster refuses or can't be reached; 2, if a file or an argument is wrong;
130 after Ctrl-C; for `run` that of the worker that failed. Files: `run` makes a temporary folder with homes and logs,
and removes it unless `--keep` is given. All other commands print.
[The guide](../guide/kubernetes.md) has examples.""",
}

# Modules whose names users call, and names that a module imports at their first use.
_MODULES = {
    "poptorch": (),
    "poptorch.optim": (),
    "poptorch.options": (),
    "poptorch.autocasting": (),
    "poptorch.notes": (),
    "poptorch.profiling": (),
    "poptorch.testing": (),
    "popdist": ("Checkpoint", "resumable"),
    "popdist.collectives": (),
    "popdist.poptorch": (),
    "lightning_graphcore": ("IPUAccelerator", "IPUPrecision", "IPUStrategy"),
    "poptorch.compiling.compilation_log": ("Overview",),  # what `describe` returns
    "popengine.order": ("Action", "After", "Order", "StepActions"),  # for an own schedule
}
_PACKAGES = ("poptorch", "popdist", "popengine", "popvision", "lightning_ipu", "lightning_graphcore")


def api_page() -> str:
    """Return the page of the signatures and docstrings of the public functions and classes."""
    text = ["# Functions and classes", ""]
    text += ["Signatures and docstrings of all public names, made from the code, by module. A class has its"]
    text += [
        "inherited members, too. [All names](names.md) and [all options](options.md) are also in tables."
    ]
    found: dict[str, dict[str, Any]] = {}
    paths: dict[int, str] = {}  # by the id of what they name; the first path of an object counts
    for module, lazy in _MODULES.items():
        space = importlib.import_module(module)
        names = sorted({*getattr(space, "__all__", ()), *lazy}, key=str.lower)
        things = {name: getattr(space, name) for name in names}
        found[module] = {n: t for n, t in things.items() if inspect.isclass(t) or inspect.isroutine(t)}
        for name, thing in found[module].items():
            own = thing.__name__ if thing.__name__ in names else name
            paths.setdefault(id(thing), f"{module}.{own}")
    for module, things in found.items():
        text += ["", f"## {module}"]
        for name, thing in things.items():
            path, known = f"{module}.{name}", paths[id(thing)]
            if known == path:
                text += _described(
                    path, thing, paths, inspect.isclass(thing) and issubclass(thing, enum.Enum)
                )
            else:
                text += ["", f"### {name} {{#{path}}}", "", f"Another name of {_reference(known)}."]
    return "\n".join(text) + "\n"


def command_page(command: str) -> str:
    """Return the page of a command: its help text, and the help text of each of its subcommands. Raises: ValueError, if
    the text above them names a subcommand or flag that the help texts lack"""
    subcommands = re.findall(r"^    ([a-z]+) ", _help(command).partition("COMMAND\n")[2], re.MULTILINE)
    sections = [f"# {command}\n\n{_COMMANDS[command]}\n\n```text\n{_help(command)}```\n"]
    sections += [f"## {command} {name}\n\n```text\n{_help(command, name)}```\n" for name in subcommands]
    known = {*subcommands, *re.findall(r"--[\w-]+", "".join(sections[0].split("```text")[1:] + sections[1:]))}
    if unknown := set(re.findall(r"`([\w-]+)`", _COMMANDS[command])) - known:
        raise ValueError(f"{command} has no {', '.join(sorted(unknown))}")
    return "\n".join(sections)


def _help(*words: str) -> str:
    """Return the help text of a command of this project, in lines of at most 100 characters."""
    environment = {**os.environ, "COLUMNS": "100"}
    command = [sys.executable, "-m", *words, "--help"]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout


def notebook_page(path: Path) -> str:
    """Return a notebook as a page: its text, its code and what the code printed or drew."""
    parts = []
    for cell in json.loads(path.read_text())["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            shown = output.get("data", {})
            if "image/svg+xml" in shown:
                parts.append("".join(shown["image/svg+xml"]))
            else:
                text = "".join(output.get("text") or shown.get("text/plain", ""))
                parts.append(f"```text\n{text.rstrip()}\n```")
    first, *rest = parts
    title, _, introduction = first.partition("\n")
    download = f"[The notebook]({path.name}), to run it yourself."
    return "\n\n".join([title, download, introduction.strip(), *rest]) + "\n"


def _described(path: str, thing: Any, paths: dict[int, str], is_member: bool = False) -> list[str]:
    """Return the lines of one name: heading, signature, whole docstring, and the same for members of a class.

    Members and enums have no heading: a search would find it before the pages that explain them.
    """
    shown = path.removeprefix(f"{next(m for m in sorted(_MODULES, key=len)[::-1] if path.startswith(m))}.")
    text = ["", f"**`{shown}`**", f"{{: #{path} }}"] if is_member else ["", f"### {shown} {{#{path}}}"]
    is_enum = inspect.isclass(thing) and issubclass(thing, enum.Enum)
    text += ["", "```py", f"{path}{'' if is_enum else _signature(thing)}", "```", ""]
    text += _paragraphs(inspect.getdoc(thing) or "")
    if not inspect.isclass(thing) or path.startswith("lightning"):  # Lightning calls the members
        return text
    if issubclass(thing, enum.Enum):
        members = ", ".join(f"`{member.name}` ({member.value})" for member in thing)
        return [*text, f"Members: {members}. Their meanings are in [enums](enums.md)."]
    members, bases = public_members(thing, paths)
    if bases:
        text += [
            f"It has the members of {' and '.join(_reference(paths[id(base)]) for base in bases)}, too.",
            "",
        ]
    if members:
        text += [f"Members: {', '.join(_reference(f'{path}.{name}', name) for name in members)}", ""]
    for name, member in members.items():
        text += _described(f"{path}.{name}", member, paths, True)
    return text


def public_members(kind: type, paths: Container[int] = ()) -> tuple[dict[str, Any], list[type]]:
    """Return the methods and properties of a class by name, its bases' included, and the bases in `paths`
    (ids of classes), whose members are left out."""
    own = [base for base in kind.__mro__ if base.__module__.split(".")[0] in _PACKAGES]
    documented = [base for base in own[1:] if id(base) in paths]
    inherited = {name for base in documented for name in dir(base)}
    found: dict[str, Any] = {}
    for base in own:
        for name, member in vars(base).items():
            is_own = base is kind or name not in inherited
            if isinstance(member, staticmethod | classmethod):
                member = getattr(kind, name)
            if is_own and not name.startswith("_") and (inspect.isroutine(member) or _is_property(member)):
                found.setdefault(name, member)
    return dict(sorted(found.items(), key=lambda item: item[0].lower())), documented


def _is_property(member: Any) -> bool:
    return isinstance(member, property | functools.cached_property)


def _reference(path: str, words: str | None = None) -> str:
    """Return a link to an entry of the page."""
    return f"[{words or path.rpartition('.')[2]}](#{path})"


def _signature(thing: Any) -> str:
    """Return the parameters and the result, without the modules of types; one parameter a line where they are long."""
    if _is_property(thing):
        result = inspect.get_annotations(getattr(thing, "fget", None) or thing.func).get("return")
        return "" if result is None else f": {_plain(result)!r}"
    try:
        signature = inspect.signature(thing)
    except (TypeError, ValueError):  # an alias of a type, an object that a property returns
        return ""
    parameters = [
        parameter.replace(annotation=_plain(parameter.annotation))
        for name, parameter in signature.parameters.items()
        if name != "self"
    ]
    result = signature.empty if inspect.isclass(thing) else _plain(signature.return_annotation)
    text = str(signature.replace(parameters=parameters, return_annotation=result))
    text = re.sub(r"\b(?:[a-z_]+\.)+(?=[A-Z])", "", text)
    text = re.sub(r"<([\w.]+): [^>]*>", r"\1", text)  # members of enums
    text = re.sub(r"<function \S*<lambda> at \w+>", "...", text)
    if hasattr(thing, "__wrapped__"):  # of contextlib.contextmanager
        text = text.replace("-> Iterator[None]", "-> ContextManager[None]")
    if len(text) < 80 or not signature.parameters:
        return text
    parts, depth, start, is_quoted = [], 0, 1, False
    for index, letter in enumerate(text):
        is_quoted ^= letter == "'"
        if is_quoted:
            continue
        depth += (letter in "([") - (letter in ")]")
        if (letter == "," and depth == 1) or (letter == ")" and depth == 0):
            parts.append(text[start:index].strip())
            start = index + 1
        if depth == 0:
            return "(\n" + "".join(f"    {part},\n" for part in parts) + f"){text[index + 1 :]}"
    return text


def _plain(annotation: Any) -> Any:
    """Return an annotation that `inspect` prints without quotes."""

    class Type:
        def __repr__(self) -> str:
            text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
            return re.sub("['~]", "", text)

    return annotation if annotation is inspect.Parameter.empty else Type()


def _paragraphs(doc: str) -> list[str]:
    """Return a docstring as Markdown: sections and examples keep their lines."""
    text = []
    for paragraph in doc.split("\n\n"):
        kept = re.match(r"(Arg|Attribute|Return|Raise|Yield|Example)s?:|>>>|\s", paragraph)
        kind = "pycon" if paragraph.startswith(">>>") else "text"
        text += [f"```{kind}", textwrap.dedent(paragraph), "```", ""] if kept else [paragraph, ""]
    return text

"""Settings of the documentation site, for Sphinx; docs/make_site.py builds it."""

project = "regard"
extensions = ["myst_parser"]
html_theme = "furo"
html_title = "regard"
html_show_copyright = False
myst_heading_anchors = 3  # links to headings, as in "numbers.md#speed-on-a-gpu"
pygments_style = "friendly"

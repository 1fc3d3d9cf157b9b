"""Views of profiles: figures (`analysis`), text, pages for a browser, comparisons.

Imports only those modules of popengine that don't load torch.
"""

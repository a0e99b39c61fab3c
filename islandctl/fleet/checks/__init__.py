"""The doctor's checks: small plugins, each one question about a node, cell, site, link or the whole fleet."""

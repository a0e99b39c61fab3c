"""Hosts, provisioning and supervisors: everything that happens on the nodes."""

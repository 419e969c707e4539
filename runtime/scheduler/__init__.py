"""Chains, cells and the directory of who holds what, over several devices. Reserved in the layout; one device needs
none of it.
"""

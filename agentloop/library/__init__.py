"""The functions behind `import agentloop as al`; `agentloop/__init__.py` lists them and loads each when it is used."""

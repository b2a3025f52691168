"""Real servers for tests: stores of objects, tables and rows, each started by a `with`.

python -m tests.servers.obtain        installs all of them under .cache/servers
with versitygw() as s3: ...           starts one on a free loopback port, and ends it
"""

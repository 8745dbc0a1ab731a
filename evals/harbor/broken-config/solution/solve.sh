#!/bin/sh
cat > /app/service.json <<'JSON'
{
  "listen": {"port": 8443, "address": "0.0.0.0"},
  "log": {"level": "info"},
  "root": "/srv/www",
  "max_clients": 64,
  "upstreams": ["10.0.0.4:9000", "10.0.0.5:9000"]
}
JSON

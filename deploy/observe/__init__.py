"""What Prometheus and Grafana need to watch a cluster: alert rules, a dashboard, and the pages that explain them."""

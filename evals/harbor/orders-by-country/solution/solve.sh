#!/usr/bin/env python3
import csv
from collections import Counter

with open("/app/customers.csv", newline="") as file:
    country = {row["id"]: row["country"] for row in csv.DictReader(file)}
orders, cents = Counter(), Counter()
with open("/app/orders.csv", newline="") as file:
    for row in csv.DictReader(file):
        if row["status"] == "paid" and row["customer_id"] in country:
            orders[country[row["customer_id"]]] += 1
            cents[country[row["customer_id"]]] += int(row["amount"])
with open("/app/totals.csv", "w", newline="") as file:
    rows = csv.writer(file, lineterminator="\n")
    rows.writerow(["country", "orders", "total"])
    for name in sorted(set(country.values()), key=lambda name: (-cents[name], name)):
        rows.writerow([name, orders[name], f"{cents[name] / 100:.2f}"])

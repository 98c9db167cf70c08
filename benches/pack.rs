//! Measures the time to read a complete pack: YAML, the compilation of every schema, and the check of every template.
//!
//! `cargo bench --bench pack` prints the median of its reads, with the fastest and the slowest.

#![allow(clippy::indexing_slicing, clippy::unwrap_used, clippy::print_stdout)]

use std::fmt::Write;
use std::hint::black_box;
use std::time::Instant;

use exeat::tool::pack::Pack;

const TOOLS: usize = 200;
const RUNS: usize = 15;

fn main() {
    let text = pack();
    let mut times: Vec<_> = (0..RUNS)
        .map(|_| {
            let start = Instant::now();
            assert_eq!(black_box(Pack::read(black_box(&text))).unwrap().tools().count(), TOOLS);
            start.elapsed()
        })
        .collect();
    times.sort();
    println!("{TOOLS} tools, {} bytes: {:?} ({:?} to {:?})", text.len(), times[RUNS / 2], times[0], times[RUNS - 1]);
}

fn pack() -> String {
    let mut text = "version: {sandbox: {network_access: true}}\ntools:\n  custom:\n".to_owned();
    for n in 0..TOOLS {
        write!(text, "    - name: tool_{n}\n      description: Does the thing number {n}.\n{TOOL}").unwrap();
    }
    text
}

const TOOL: &str = r#"      parameters:
        type: object
        properties:
          sku: { type: string, pattern: "^[A-Z0-9-]{1,32}$" }
          count: { type: integer, minimum: 1, maximum: 100 }
          order: { type: object, properties: { id: { type: string }, note: { type: string } }, required: [id] }
          size: { type: string, enum: [s, m, l] }
        required: [sku, order]
        additionalProperties: false
      implementation:
        primitive: http_request
        args:
          method: POST
          url: https://api.example.com/orders/${order.id}/items?sku=${sku}
          headers: { Authorization: "Bearer ${secrets.KEY}", X-Size: "${size}" }
          body: { sku: "${sku}", count: "${count}", note: "for ${order.note}" }
"#;

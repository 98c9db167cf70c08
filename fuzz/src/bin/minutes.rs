//! Runs a target on mutated inputs for a number of seconds, where libFuzzer is not available: `minutes scan 240
//! [seed]`.

use std::process::ExitCode;
use std::time::{Duration, Instant};

fn main() -> ExitCode {
    // The target `script_runs` starts this program for its scripts.
    if std::env::args().nth(1).is_some_and(|command| command.starts_with("confined-")) {
        return exeat::tool::command::main();
    }
    // At its end, a thread removes what the targets have made for it.
    std::thread::spawn(run).join().unwrap_or(ExitCode::FAILURE)
}

fn run() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let wanted = args.first().map_or("", String::as_str);
    let Some((name, target, seeds)) = exeat_fuzz::TARGETS.into_iter().find(|(name, ..)| *name == wanted) else {
        let all = exeat_fuzz::TARGETS.map(|(name, ..)| name).join(", ");
        eprintln!("minutes TARGET SECONDS [SEED], TARGET one of {all}");
        return ExitCode::FAILURE;
    };
    let number = |at: usize, otherwise: u64| args.get(at).and_then(|text| text.parse().ok()).unwrap_or(otherwise);
    let mut random = Random(number(2, 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let seeds = seeds();
    let mut pool = seeds.clone();
    let (start, time) = (Instant::now(), Duration::from_secs(number(1, 60)));
    let mut cases = 0_u64;
    while start.elapsed() < time {
        let input = random.change(&pool);
        let outcome = std::panic::catch_unwind(|| target(&input));
        if outcome.is_err() {
            let path = format!("{name}-{cases}.bin");
            std::fs::write(&path, &input).expect("the directory can be written to");
            eprintln!("{name}: case {cases} of {} bytes failed, see {path}", input.len());
            return ExitCode::FAILURE;
        }
        cases += 1;
        // Inputs that were mutated are mutated again.
        if random.below(8) == 0 {
            if pool.len() > 400 {
                pool = seeds.clone();
            }
            pool.push(input);
        }
    }
    println!(
        "{name}: {cases} cases in {:?}, {:.0} a second",
        start.elapsed(),
        cases as f64 / start.elapsed().as_secs_f64()
    );
    ExitCode::SUCCESS
}

struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        ((self.0 >> 16) % n.max(1) as u64) as usize
    }

    fn change(&mut self, pool: &[Vec<u8>]) -> Vec<u8> {
        let mut input = pool[self.below(pool.len())].clone();
        for _ in 0..=self.below(5) {
            let at = self.below(input.len() + 1);
            match self.below(8) {
                0 => input.truncate(at),
                1 => input.insert(at, self.below(256) as u8),
                2 | 3 if at < input.len() => input[at] = self.below(256) as u8,
                4 if at < input.len() => input[at] ^= 1 << self.below(8),
                5 => {
                    // A part of another input.
                    let other = &pool[self.below(pool.len())];
                    let (a, b) = (self.below(other.len() + 1), self.below(other.len() + 1));
                    input.splice(at..at, other[a.min(b)..a.max(b)].iter().copied());
                }
                6 => {
                    let end = at + self.below(input.len() - at + 1);
                    input.drain(at..end);
                }
                _ => {
                    let some = *b"%\\&u\n\r{}#;x25\"/".get(self.below(15)).unwrap_or(&b'%');
                    input.splice(at..at, std::iter::repeat_n(some, 1 + self.below(3)));
                }
            }
        }
        input.truncate(8192);
        input
    }
}

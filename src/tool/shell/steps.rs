//! Runs a compiled script.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tokio::time::timeout;

use super::Executor;
use super::compile::{Guard, MAX_ARGUMENTS, Program, RunValues, Step, Template, check_argument};
use super::front_end;
use super::options::{FailureMode, MAX_OUTPUT};
#[cfg(target_os = "linux")]
use super::programs::Purpose;
use super::sandbox::Sandbox;
use super::script::Predicate;
use super::table::{Place, runs_in};
#[cfg(target_os = "linux")]
use super::{child::Request, compile::Extra};
use crate::tool::outcome::State;
use crate::tool::tool_response;
use crate::tool::verbs::{Context, Network, VerbResult};

/// Maximum number of operations that are handed over at once, and size of their arguments, in bytes.
const MAX_AHEAD: usize = 64;
const MAX_AHEAD_BYTES: usize = 256 * 1024;
/// The room for tags around a text that is cut.
const TAGS: usize = 64;

/// An operation that has been reached, with its result. `None` if its condition did not hold.
struct Reached<'a> {
    step: &'a Step,
    done: Option<VerbResult>,
}

/// A script that is running.
struct Run<'a> {
    program: &'a Program,
    sandbox: &'a Sandbox,
    executor: Executor<'a>,
    /// The operations of the script, or those of its cleanup.
    steps: &'a [Step],
    context: Context<'a>,
    values: RunValues,
    started: Instant,
    output_left: usize,
    /// The bytes that all errors together may still have.
    error_left: usize,
    reached: Vec<Reached<'a>>,
}

/// The continuation after an operation.
enum Next {
    Step(usize),
    /// The script ends, with an error if it is the last operation's.
    End,
    /// An operation waits for the operator.
    Waits(VerbResult),
}

/// Runs operations in order. If one waits for the operator, the script waits too and nothing after it is run.
pub(super) async fn run(
    program: &Program,
    sandbox: &Sandbox,
    executor: Executor<'_>,
    context: Context<'_>,
) -> VerbResult {
    let mut run = Run {
        program,
        sandbox,
        executor,
        steps: &program.steps,
        context,
        values: RunValues::default(),
        started: Instant::now(),
        output_left: program.options.max_output,
        error_left: program.options.max_error,
        reached: Vec::new(),
    };
    let mut at = 0;
    while let Some(step) = program.steps.get(at) {
        match run.reach(step, at).await {
            Next::Step(next) => at = next,
            Next::End => break,
            Next::Waits(waiting) => return waiting,
        }
    }
    let done = run.combined_result();
    let is_clean = done.state == State::Completed || !program.options.failure_mode.cleans_up();
    if program.cleanup.is_empty() || is_clean {
        return done;
    }
    run.clean_up(done).await
}

impl<'a> Run<'a> {
    /// Runs the step at this position, if its conditions hold.
    async fn reach(&mut self, step: &'a Step, at: usize) -> Next {
        let left = self.program.options.script_timeout.saturating_sub(self.started.elapsed());
        if left.is_zero() && !self.executor.is_ahead() {
            self.keep(step, VerbResult::failed("not run: the script exceeded its scriptTimeout"));
            return Next::End;
        }
        let following = Next::Step(at.saturating_add(1));
        let deadline = self.started.checked_add(self.program.options.script_timeout);
        let rest = || deadline.map_or(left, |deadline| deadline.saturating_duration_since(Instant::now()));
        let done = match self.guards_hold(step, &rest).await {
            Ok(false) => {
                self.reached.push(Reached { step, done: None });
                return following;
            }
            Ok(true) => self.repeat(step, at, rest()).await,
            Err(done) => done,
        };
        if done.state == State::AwaitingApproval {
            return Next::Waits(done);
        }
        let is_error = done.state != State::Completed;
        self.keep(step, done);
        let is_over = self.started.elapsed() >= self.program.options.script_timeout;
        match (is_error, step.on_failure, self.program.options.failure_mode) {
            (false, ..) => following,
            (true, Some(label), _) if !is_over => Next::Step(label),
            (true, None, FailureMode::Continue) if !is_over => following,
            (true, ..) => Next::End,
        }
    }

    /// Keeps a result: for the steps after it as a whole, and for the result of the script as far as there is room.
    fn keep(&mut self, step: &'a Step, done: VerbResult) {
        let is_completed = done.state == State::Completed;
        let left = if is_completed { &mut self.output_left } else { &mut self.error_left };
        let text = bounded(&done.text, *left);
        *left = left.saturating_sub(text.len());
        if let (Some(name), true) = (&step.capture, is_completed) {
            self.values.captures.insert(name.clone(), done.text.clone());
        }
        if self.program.options.pipes {
            self.values.previous = if is_completed { done.text } else { String::new() };
        }
        self.reached.push(Reached { step, done: Some(VerbResult { state: done.state, text }) });
    }

    /// Runs a step until it is done, or has failed as often as it may.
    async fn repeat(&mut self, step: &Step, at: usize, left: Duration) -> VerbResult {
        let started = Instant::now();
        let mut delay = self.program.options.retry_delay;
        let mut retries = step.retries;
        loop {
            let done = self.once(step, at, left.saturating_sub(started.elapsed())).await;
            let is_last = retries == 0 || left.saturating_sub(started.elapsed()) <= delay;
            if done.state != State::Failed || is_last {
                return done;
            }
            retries = retries.saturating_sub(1);
            tokio::time::sleep(delay).await;
            delay = delay.saturating_mul(2);
        }
    }

    /// Runs a step once, within the time left.
    async fn once(&mut self, step: &Step, at: usize, left: Duration) -> VerbResult {
        let (within, name) = if left < step.within { (left, "scriptTimeout") } else { (step.within, "stepTimeout") };
        if self.executor.is_ahead() {
            return self.executor.next(within, name).await;
        }
        let args = match self.arguments(step) {
            Ok(args) => args,
            Err(done) => return done,
        };
        let verb = step.verb.name;
        match runs_in(verb) {
            Place::Sandbox => self.run_ahead((step, at), args, left, (within, name)).await,
            Place::Program => self.run_program(&args, (within, name)).await,
            place => {
                let running = async {
                    match (place, Network::named(verb)) {
                        (Place::Proxy, Some(network)) => network.run(&args, self.context).await,
                        _ => front_end::run(verb, &args, self.sandbox).await,
                    }
                };
                let done = timeout(within, running).await;
                let done = done.map(|done| match place {
                    Place::FrontEnd if done.text.len() > MAX_OUTPUT => {
                        VerbResult::failed(&format!("the output has more than {MAX_OUTPUT} bytes"))
                    }
                    _ => done,
                });
                done.unwrap_or_else(|_| {
                    let effect = if place == Place::Proxy { "; its requests may have had an effect" } else { "" };
                    VerbResult::failed(&format!("exceeded its {name}{effect}"))
                })
            }
        }
    }

    /// Runs the step at this position in the confined process, and hands it those after it that depend on nothing before them.
    #[cfg(target_os = "linux")]
    async fn run_ahead(
        &mut self,
        (step, at): (&Step, usize),
        args: Vec<String>,
        left: Duration,
        (within, limit): (Duration, &str),
    ) -> VerbResult {
        let request = |step: &Step, args| {
            let ends_batch = step.on_failure.is_some() || self.program.options.failure_mode != FailureMode::Continue;
            Request { ends_batch, ..Request::new(step.verb.name, args, &step.extra, step.within) }
        };
        let mut requests = vec![request(step, args)];
        let mut size = 0_usize;
        let after = self.steps.iter().skip(at.saturating_add(1)).take(MAX_AHEAD.saturating_sub(1));
        for step in after.take_while(|after| step.retries == 0 && after.is_independent()) {
            let Ok(args) = self.arguments(step) else { break };
            size = args.iter().map(String::len).fold(size.saturating_add(step.extra.size()), usize::saturating_add);
            if size > MAX_AHEAD_BYTES {
                break;
            }
            requests.push(request(step, args));
        }
        match self.executor.send(requests, left).await {
            Ok(()) => self.executor.next(within, limit).await,
            Err(done) => done,
        }
    }

    /// Runs a program, if a template permits it.
    #[cfg(target_os = "linux")]
    async fn run_program(&mut self, args: &[String], (within, limit): (Duration, &str)) -> VerbResult {
        let place = (self.sandbox, self.executor.confinement());
        match self.sandbox.programs.command(args, Purpose::Script) {
            Ok(command) => super::programs::run(command, place, self.context.proxy, within, limit).await,
            Err(why) => VerbResult::denied(&why),
        }
    }

    #[cfg(target_os = "linux")]
    async fn run_confined(&mut self, verb: &str, args: Vec<String>, within: Duration) -> VerbResult {
        self.executor.run(Request::new(verb, args, &Extra::None, within), within, "stepTimeout").await
    }

    #[cfg(not(target_os = "linux"))]
    async fn run_ahead(&mut self, _: (&Step, usize), _: Vec<String>, _: Duration, _: (Duration, &str)) -> VerbResult {
        VerbResult::denied("it runs on Linux only")
    }

    #[cfg(not(target_os = "linux"))]
    async fn run_program(&mut self, _: &[String], _: (Duration, &str)) -> VerbResult {
        VerbResult::denied("it runs on Linux only")
    }

    #[cfg(not(target_os = "linux"))]
    async fn run_confined(&mut self, verb: &str, _: Vec<String>, _: Duration) -> VerbResult {
        VerbResult::denied(&format!("{verb} runs on Linux only"))
    }

    /// Returns the arguments of a step, and judges those that were not known before.
    fn arguments(&self, step: &Step) -> Result<Vec<String>, VerbResult> {
        let args = self.texts(&step.args)?;
        for (index, arg) in args.iter().enumerate() {
            check_argument(self.sandbox, step.verb.name, index, arg).map_err(|text| VerbResult::denied(&text))?;
        }
        Ok(args)
    }

    /// Returns the texts of arguments, if they are not too large.
    fn texts(&self, args: &[Template]) -> Result<Vec<String>, VerbResult> {
        let size = args.iter().map(|arg| arg.size(&self.values)).fold(0, usize::saturating_add);
        if size > MAX_ARGUMENTS {
            return Err(VerbResult::failed(&format!("the arguments have more than {} MiB", MAX_ARGUMENTS >> 20)));
        }
        Ok(args.iter().map(|arg| arg.text(&self.values)).collect())
    }

    /// Returns whether all conditions of a step hold.
    async fn guards_hold(&mut self, step: &Step, rest: &impl Fn() -> Duration) -> Result<bool, VerbResult> {
        for guard in &step.guards {
            let decided = self.values.decided.get(&guard.id).copied();
            let holds = match decided {
                Some(holds) => holds,
                None => {
                    let holds = self.guard_holds(guard, rest().min(step.within)).await;
                    // A condition that has failed is not tried again.
                    self.values.decided.insert(guard.id, holds.as_ref().is_ok_and(|holds| *holds));
                    holds?
                }
            };
            if !holds {
                return Ok(false);
            }
        }
        Ok(true)
    }

    async fn guard_holds(&mut self, guard: &Guard, within: Duration) -> Result<bool, VerbResult> {
        let args = self.texts(&guard.args)?;
        for arg in &args {
            check_argument(self.sandbox, guard.predicate.verb(), 0, arg).map_err(|text| VerbResult::denied(&text))?;
        }
        let (first, second) = (args.first().cloned().unwrap_or_default(), args.get(1).cloned().unwrap_or_default());
        let previous = &self.values.previous;
        let captured = || self.values.captures.get(&first).map(String::as_str).unwrap_or_default();
        Ok(match guard.predicate {
            Predicate::PrevContains => previous.contains(&first),
            Predicate::PrevEmpty => previous.trim().is_empty(),
            Predicate::PrevStartsWith => previous.starts_with(&first),
            Predicate::PrevEndsWith => previous.ends_with(&first),
            Predicate::PrevEquals => *previous == first,
            Predicate::PrevLineCount => first.parse() == Ok(previous.lines().count()),
            Predicate::CaptureEmpty => captured().trim().is_empty(),
            Predicate::CaptureContains => captured().contains(&second),
            Predicate::EnvEquals => front_end::environment(&first, self.sandbox) == Some(second),
            Predicate::PrevMatch | Predicate::FileExists | Predicate::DirExists => {
                let args = match guard.predicate {
                    Predicate::PrevMatch => vec![previous.clone(), first],
                    _ => vec![first],
                };
                let verb = guard.predicate.verb();
                let done = self.run_confined(verb, args, within).await;
                if done.state != State::Completed {
                    return Err(done);
                }
                done.text == "True"
            }
        })
    }

    /// Runs the cleanup, whatever of it fails, and adds it to the result.
    async fn clean_up(&mut self, mut done: VerbResult) -> VerbResult {
        self.reached.clear();
        self.executor.abandon();
        self.steps = &self.program.cleanup;
        self.started = Instant::now();
        self.output_left = self.program.options.max_output;
        self.error_left = self.program.options.max_error;
        let mut at = 0;
        while let Some(step) = self.program.cleanup.get(at) {
            at = match self.reach(step, at).await {
                Next::Step(next) => next,
                Next::End if self.started.elapsed() < self.program.options.script_timeout => at.saturating_add(1),
                Next::End => break,
                Next::Waits(_) => {
                    let text = "awaits approval, which a cleanup does not wait for";
                    self.keep(step, VerbResult::denied(text));
                    at.saturating_add(1)
                }
            };
        }
        done.text.push_str(&format!("; cleanup: {}", shown(&self.reached)));
        done
    }

    /// Returns the result of all operations.
    fn combined_result(&mut self) -> VerbResult {
        let is_alone = self.program.steps.len() == 1;
        match self.reached.as_slice() {
            [Reached { done: Some(only), .. }] if is_alone => return only.clone(),
            _ => {}
        }
        match self.reached.split_last() {
            Some((Reached { step, done: Some(last) }, before))
                if last.state != State::Completed && self.program.options.failure_mode != FailureMode::Continue =>
            {
                let mut text = format!("{} ({}): {}", step.place, step.verb.name, last.text);
                if !before.is_empty() {
                    text.push_str(&format!("; before it: {}", shown(before)));
                }
                VerbResult { state: last.state.clone(), text }
            }
            _ => {
                let states: Vec<&State> =
                    self.reached.iter().filter_map(|one| Some(&one.done.as_ref()?.state)).collect();
                let is_any = states.iter().any(|state| **state == State::Completed);
                let state = states.first().filter(|_| !is_any).map_or(State::Completed, |first| (*first).clone());
                VerbResult { state, text: shown(&self.reached) }
            }
        }
    }
}

/// Cuts a text. A response keeps its tags if there is little before them.
fn bounded(text: &str, most: usize) -> String {
    let cut = tool_response::truncate(text, most);
    if cut.len() <= most.saturating_add(TAGS) {
        return cut;
    }
    let end = text.floor_char_boundary(most);
    format!("{}…", text.get(..end).unwrap_or_default())
}

fn shown(reached: &[Reached<'_>]) -> String {
    Value::Array(reached.iter().map(Reached::shown).collect()).to_string()
}

impl Reached<'_> {
    fn shown(&self) -> Value {
        let verb = self.step.verb.name;
        let Some(done) = &self.done else { return json!({ "verb": verb, "status": "Skipped" }) };
        let (status, member) = match done.state {
            State::Completed => ("Completed", "output"),
            State::Denied => ("Denied", "error"),
            State::AwaitingApproval | State::Failed => ("Failed", "error"),
        };
        json!({ "verb": verb, "status": status, member: done.text })
    }
}

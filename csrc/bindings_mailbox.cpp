// The Python face of the mailbox, for both engines: its layout, either side's steps, the doorbell.
//
// Waits let go of the GIL and say how they ended: "ready", "timed out", "peer gone", "cancelled".
#include "bindings_mailbox.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <iterator>
#include <memory>
#include <string>
#include <utility>

#include "doorbell.h"

using namespace nanobind::literals;

namespace dualpace {
namespace {

Area parse_area(const std::string& name) {
  static constexpr const char* kNames[kNumAreas] = {
      "descriptor", "tokens",   "positions", "temperatures", "seeds",
      "sampled",    "logprobs", "attended",  "qkv",          "rules"};
  const auto* found = std::find(std::begin(kNames), std::end(kNames), name);
  require(found != std::end(kNames), "a mailbox has no area " + name);
  return static_cast<Area>(found - kNames);
}

Side parse_side(const std::string& name) {
  require(name == "cpu" || name == "gpu", "side must be cpu or gpu");
  return name == "cpu" ? kCpuSide : kGpuSide;
}

void check_slot(const MailboxLayout& layout, int slot, int layer, int layers) {
  require(slot >= 0 && slot < kSlots, "no such slot");
  require(layer >= 0 && layer < layers && layers <= layout.shape().num_layers + 1,
          "no such layer");
}

int64_t microseconds(double seconds) { return static_cast<int64_t>(seconds * 1e6); }

// Calls a Python function from the doorbell's thread.
class PythonDoorbell {
 public:
  PythonDoorbell(SharedMailbox& mailbox, nb::callable answer) : answer_(std::move(answer)) {
    bell_ = std::make_unique<Doorbell>(mailbox.box, [this](int slot, const Descriptor& asked) {
      const nb::gil_scoped_acquire acquire;
      try {
        answer_(slot, asked.iteration, asked.rows, asked.rules_bytes);
      } catch (nb::python_error& error) {
        error.discard_as_unraisable(answer_);
      }
    });
  }
  ~PythonDoorbell() { close(); }

  void close() {
    {
      const nb::gil_scoped_release release;
      bell_.reset();
    }
    answer_ = nb::callable();  // which may hold us
  }

 private:
  nb::callable answer_;
  std::unique_ptr<Doorbell> bell_;
};

}  // namespace
}  // namespace dualpace

NB_MODULE(_mailbox, m) {
  using namespace dualpace;
  m.doc() = "Shared memory in which the engines take turns, for GPU Dense Assist.";
  m.attr("SLOTS") = kSlots;
  m.attr("MAX_LOGPROBS") = kMaxLogprobs;

  nb::class_<MailboxLayout>(m, "Layout", "Offsets and sizes of everything in a mailbox.")
      .def("__init__",
           [](MailboxLayout* self, int num_layers, int num_heads, int num_kv_heads, int head_dim,
              int element_bytes, int max_rows, size_t rules_bytes) {
             new (self) MailboxLayout({num_layers, num_heads, num_kv_heads, head_dim,
                                       element_bytes, max_rows, rules_bytes});
           },
           nb::kw_only(), "num_layers"_a, "num_heads"_a, "num_kv_heads"_a, "head_dim"_a,
           "element_bytes"_a, "max_rows"_a, "rules_bytes"_a)
      .def_prop_ro("bytes", &MailboxLayout::bytes)
      .def_prop_ro("device_bytes", &MailboxLayout::device_bytes)
      .def_prop_ro("max_rows", [](const MailboxLayout& l) { return l.shape().max_rows; })
      .def_prop_ro("num_layers", [](const MailboxLayout& l) { return l.shape().num_layers; })
      .def_prop_ro("element_bytes", [](const MailboxLayout& l) { return l.shape().element_bytes; })
      .def("busy", [](const MailboxLayout& l, int slot) {
        check_slot(l, slot, 0, 1);
        return l.busy(slot);
      }, "slot"_a)
      .def("go", [](const MailboxLayout& l, int slot, int layer) {
        check_slot(l, slot, layer, l.shape().num_layers);
        return l.go(slot, layer);
      }, "slot"_a, "layer"_a)
      .def("done", [](const MailboxLayout& l, int slot, int layer) {
        check_slot(l, slot, layer, l.shape().num_layers + 1);
        return l.done(slot, layer);
      }, "slot"_a, "layer"_a)
      .def("area", [](const MailboxLayout& l, int slot, const std::string& name) {
        check_slot(l, slot, 0, 1);
        const Area area = parse_area(name);
        return std::make_pair(l.area(slot, area), l.area_bytes(area));
      }, "slot"_a, "name"_a);

  nb::class_<SharedMailbox>(m, "Mailbox", "One engine's view of the shared memory.")
      .def("__init__",
           [](SharedMailbox* self, nb::handle memory, const MailboxLayout& layout,
              const std::string& side, double patience, double silence) {
             new (self) SharedMailbox(memory, layout, parse_side(side),
                                      {microseconds(patience), microseconds(silence)});
           },
           "memory"_a, "layout"_a, "side"_a, "patience"_a, "silence"_a)
      .def_prop_ro("layout", [](const SharedMailbox& m) { return m.box.layout(); })
      .def_prop_ro("generation", [](const SharedMailbox& m) { return m.box.generation(); })
      .def("area", [](nb::handle_t<SharedMailbox> self, int slot, const std::string& name) {
        Mailbox& box = nb::cast<SharedMailbox&>(self).box;
        check_slot(box.layout(), slot, 0, 1);
        const Area area = parse_area(name);
        return nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(
            box.area<uint8_t>(slot, area), {box.layout().area_bytes(area)}, self);
      }, "slot"_a, "name"_a)
      .def("close", [](SharedMailbox& m) { m.box.close(); })
      .def("begin", [](SharedMailbox& m) {
        const nb::gil_scoped_release release;
        return std::string(describe(m.box.begin()));
      })
      .def("submit", [](SharedMailbox& m, int slot, uint64_t iteration, int rows, nb::bytes rules) {
        check_slot(m.box.layout(), slot, 0, 1);
        m.box.submit(slot, iteration, rows, {rules.c_str(), rules.size()});
      }, "slot"_a, "iteration"_a, "rows"_a, "rules"_a)
      .def("ring", [](SharedMailbox& m) { m.box.ring(); })
      .def("wait_done", [](SharedMailbox& m, int slot, int layer) {
        check_slot(m.box.layout(), slot, layer, m.box.layout().shape().num_layers + 1);
        const nb::gil_scoped_release release;
        return std::string(describe(m.box.wait_done(slot, layer)));
      }, "slot"_a, "layer"_a)
      .def("post_go", [](SharedMailbox& m, int slot, int layer) {
        check_slot(m.box.layout(), slot, layer, m.box.layout().shape().num_layers);
        m.box.post_go(slot, layer);
      }, "slot"_a, "layer"_a)
      .def("cancel", [](SharedMailbox& m, int slot) {
        check_slot(m.box.layout(), slot, 0, 1);
        m.box.cancel(slot);
      }, "slot"_a)
      .def("wait_go", [](SharedMailbox& m, int slot, int layer) {
        check_slot(m.box.layout(), slot, layer, m.box.layout().shape().num_layers);
        const nb::gil_scoped_release release;
        return std::string(describe(m.box.wait_go(slot, layer)));
      }, "slot"_a, "layer"_a)
      .def("post_done", [](SharedMailbox& m, int slot, int layer) {
        check_slot(m.box.layout(), slot, layer, m.box.layout().shape().num_layers + 1);
        m.box.post_done(slot, layer);
      }, "slot"_a, "layer"_a)
      .def("finish", [](SharedMailbox& m, int slot) {
        check_slot(m.box.layout(), slot, 0, 1);
        m.box.finish(slot);
      }, "slot"_a)
      .def("fail", [](SharedMailbox& m, int slot) {
        check_slot(m.box.layout(), slot, 0, 1);
        m.box.fail(slot);
      }, "slot"_a);

  nb::class_<PythonDoorbell>(m, "Doorbell", "Calls `answer` for each new request, on its thread.")
      .def(nb::init<SharedMailbox&, nb::callable>(), "mailbox"_a, "answer"_a,
           nb::keep_alive<1, 2>())
      .def("close", &PythonDoorbell::close);
}
